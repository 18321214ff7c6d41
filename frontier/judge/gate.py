"""Compares outputs with a reference under the contract's rule; verdicts of parts add up.

Takes    rows of output and of reference, and the rule.
Gives    a `Verdict` that names the worst place.
Knows nothing of where either came from.

Letters  B rows, S positions, D width, N tokens (B x S).
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Compared at a time, in float64 on the device of the reference: 128 MiB of differences.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How some elements fared. `budget` is the largest `min(|u-r| / atol, |u-r| / (rtol |r|))`: below 1 passes."""

    elements: int = 0
    failing: int = 0
    nonfinite: int = 0
    budget: float = 0.0
    largest_error: float = 0.0
    row: int | None = None
    position: int | None = None
    channel: int | None = None
    got: float | None = None
    wanted: float | None = None

    @property
    def passes(self) -> bool:
        """Every element passed, and there was at least one."""
        return self.elements > 0 and self.failing == 0

    def __add__(self, other: "Verdict") -> "Verdict":
        worse = self if self.elements and not other.budget > self.budget else other
        return Verdict(
            elements=self.elements + other.elements,
            failing=self.failing + other.failing,
            nonfinite=self.nonfinite + other.nonfinite,
            budget=max(self.budget, other.budget),
            largest_error=max(self.largest_error, other.largest_error),
            row=worse.row,
            position=worse.position,
            channel=worse.channel,
            got=worse.got,
            wanted=worse.wanted,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON: a number that is not finite is its name."""
        told = {name: finite_or_name(value) for name, value in asdict(self).items()}
        return {"verdict": "pass" if self.passes else "fail", **told}


def finite_or_name(value: Any) -> Any:
    """The value itself; for a number that JSON does not know "inf", "-inf" or "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(got_SD: Tensor, wanted_SD: Tensor, atol: float, rtol: float, row: int) -> Verdict:
    """Judge one row, every element: it passes when both are finite and the error is under either bound.

    Source   configs/CONTRACT.md, section 3. A number that is not finite counts as a budget of infinity.
    """
    return compare_rows(got_SD[None], wanted_SD[None], atol, rtol, first_row=row)


def compare_rows(got_BSD: Tensor, wanted_BSD: Tensor, atol: float, rtol: float, first_row: int = 0) -> Verdict:
    """Judge whole rows as `compare` does, in float64 where the reference lies; one small copy to the host a block."""
    assert got_BSD.shape == wanted_BSD.shape, (got_BSD.shape, wanted_BSD.shape)
    _, positions, width = wanted_BSD.shape
    got_ND, wanted_ND = got_BSD.reshape(-1, width), wanted_BSD.reshape(-1, width)
    total = Verdict()
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, len(wanted_ND), step):
        wanted = wanted_ND[start : start + step].double()
        got = got_ND[start : start + step].to(wanted.device).double()
        block, worst = _compare_block(got, wanted, atol, rtol)
        row, position = divmod(start + worst // width, positions)
        total += replace(block, row=first_row + row, position=position, channel=worst % width)
    return total


def _compare_block(got_ND: Tensor, wanted_ND: Tensor, atol: float, rtol: float) -> tuple[Verdict, int]:
    """The verdict, which names no place yet, and the place of the worst element."""
    # Under either bound is under the larger one; a NaN or infinity of either side makes the error NaN or infinite.
    bound = (rtol * wanted_ND.abs()).clamp_(min=atol)
    error = (got_ND - wanted_ND).abs_()
    finite = torch.isfinite(error)
    failing = (~(error < bound)).sum()
    error = torch.where(finite, error, torch.inf)
    largest_error, budget = error.max(), torch.where(finite, error / bound, torch.inf)
    worst = budget.argmax()
    spot = (budget.take(worst), largest_error, got_ND.take(worst), wanted_ND.take(worst))  # indexing would wait
    counts = (failing, (~finite).sum(), worst)
    numbers = torch.stack([number.double() for number in (*counts, *spot)]).tolist()  # exact: below 2^53
    verdict = Verdict(
        elements=budget.numel(),
        failing=int(numbers[0]),
        nonfinite=int(numbers[1]),
        budget=numbers[3],
        largest_error=numbers[4],
        got=numbers[5],
        wanted=numbers[6],
    )
    return verdict, int(numbers[2])
