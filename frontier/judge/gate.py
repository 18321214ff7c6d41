"""Compares outputs with a reference under the contract's rule; verdicts of parts add up.

Takes    rows of output and of reference, and the rule.
Gives    a `Verdict` that names the worst place.
Knows nothing of where either came from.

Letters  S positions, D width.
"""

from dataclasses import asdict, dataclass
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
        return {"verdict": "pass" if self.passes else "fail", **asdict(self)}


def compare(got_SD: Tensor, wanted_SD: Tensor, atol: float, rtol: float, row: int) -> Verdict:
    """Judge one row, every element: it passes when both are finite and the error is under either bound.

    Source   configs/CONTRACT.md, section 3. A number that is not finite counts as a budget of infinity.
    """
    assert got_SD.shape == wanted_SD.shape, (got_SD.shape, wanted_SD.shape)
    width = wanted_SD.shape[-1]
    total = Verdict()
    step = max(1, BLOCK_ELEMENTS // width)
    for start in range(0, len(wanted_SD), step):
        wanted = wanted_SD[start : start + step].double()
        got = got_SD[start : start + step].to(wanted.device).double()
        total += _compare_block(got, wanted, atol, rtol, row, start, width)
    return total


def _compare_block(got: Tensor, wanted: Tensor, atol: float, rtol: float, row: int, start: int, width: int) -> Verdict:
    error = (got - wanted).abs()
    finite = torch.isfinite(got) & torch.isfinite(wanted)
    # A reference of 0 makes the relative budget x / 0: infinite, or NaN for an exact hit, which is no error.
    budget = torch.minimum(error / atol, (error / (rtol * wanted.abs())).nan_to_num(nan=0.0, posinf=torch.inf))
    budget = torch.where(finite, budget, torch.inf)
    passes = finite & ((error < atol) | (error < rtol * wanted.abs()))
    worst = int(budget.argmax())
    return Verdict(
        elements=budget.numel(),
        failing=int((~passes).sum()),
        nonfinite=int((~finite).sum()),
        budget=float(budget.flatten()[worst]),
        largest_error=float(torch.where(finite, error, torch.inf).max()),
        row=row,
        position=start + worst // width,
        channel=worst % width,
        got=float(got.flatten()[worst]),
        wanted=float(wanted.flatten()[worst]),
    )
