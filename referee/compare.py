"""The comparison rule, element by element, and the worst of them.

Takes    output and reference of some positions of one row.
Gives    a `Tally`, and tallies add up.
Knows nothing of where either came from.

Letters  C positions, D width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The element that uses most of its budget; a nonfinite one uses an infinite share."""

    row: int
    position: int
    channel: int
    output: float
    reference: float
    budget_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What a comparison found so far."""

    elements: int
    failing: int
    nonfinite: int
    reference_nonfinite: int
    worst: Worst

    @property
    def verdict(self) -> str:
        return "pass" if self.failing == 0 else "fail"

    def as_json(self) -> dict[str, Any]:
        """JSON knows no nan and no inf: those become text."""
        worst = {key: value if math.isfinite(value) else str(value) for key, value in asdict(self.worst).items()}
        return {"verdict": self.verdict, **asdict(self), "worst": worst}

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            elements=self.elements + other.elements,
            failing=self.failing + other.failing,
            nonfinite=self.nonfinite + other.nonfinite,
            reference_nonfinite=self.reference_nonfinite + other.reference_nonfinite,
            worst=max(self.worst, other.worst, key=lambda worst: worst.budget_fraction),
        )


def compare(output_CD: Tensor, reference_CD: Tensor, positions_C: Tensor, row: int, atol: float, rtol: float) -> Tally:
    """Apply the contract's rule: `|u - r| < atol` or `|u - r| < rtol |r|`, both finite.

    Shapes   `positions_C` says which positions of the row these are.
    """
    if output_CD.shape != reference_CD.shape or len(positions_C) != len(output_CD):
        raise ValueError(f"cannot compare {list(output_CD.shape)} with {list(reference_CD.shape)}")
    u_CD, r_CD = output_CD.double(), reference_CD.double()
    error_CD, finite_CD = (u_CD - r_CD).abs(), u_CD.isfinite() & r_CD.isfinite()
    passes_CD = finite_CD & ((error_CD < atol) | (error_CD < rtol * r_CD.abs()))
    # fmin steps over the 0 / 0 of an exact zero.
    budget_CD = torch.fmin(error_CD / atol, error_CD / (rtol * r_CD.abs()))
    budget_CD.masked_fill_(~finite_CD, math.inf)
    position, channel = divmod(int(budget_CD.argmax()), u_CD.shape[1])
    return Tally(
        elements=u_CD.numel(),
        failing=u_CD.numel() - int(passes_CD.sum()),
        nonfinite=int((~u_CD.isfinite()).sum()),
        reference_nonfinite=int((~r_CD.isfinite()).sum()),
        worst=Worst(
            row=row,
            position=int(positions_C[position]),
            channel=channel,
            output=float(u_CD[position, channel]),
            reference=float(r_CD[position, channel]),
            budget_fraction=float(budget_CD[position, channel]),
        ),
    )
