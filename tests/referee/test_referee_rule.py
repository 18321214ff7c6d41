"""The comparison rule: one element at a time, either bound, and the worst place named."""

import math

import pytest
import torch
from torch import Tensor

from referee.compare import Tally, compare


def tally(output: list[list[float]], reference: list[list[float]], first: int = 0) -> Tally:
    u, r = torch.tensor(output, dtype=torch.float32), torch.tensor(reference, dtype=torch.float64)
    positions: Tensor = torch.arange(first, first + len(u))
    return compare(u, r, positions, row=3, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize(
    ("output", "reference", "verdict"),
    [
        (0.0019, 0.0, "pass"),
        (0.0021, 0.0, "fail"),
        (10.19, 10.0, "pass"),
        (10.201, 10.0, "fail"),  # isclose, which adds the bounds, would let this pass
        (-10.19, -10.0, "pass"),
        (10.0, -10.0, "fail"),
        (0.0, 0.0, "pass"),
        (math.nan, 0.0, "fail"),
        (math.inf, 1.0, "fail"),
        (1.0, math.inf, "fail"),
        (math.inf, math.inf, "fail"),
        (math.nan, math.nan, "fail"),
        (1.0, math.nan, "fail"),
    ],
)
def test_an_element_passes_by_either_bound_and_only_if_finite(output: float, reference: float, verdict: str) -> None:
    assert tally([[output]], [[reference]]).verdict == verdict


def test_the_worst_element_is_named_with_its_place_and_share() -> None:
    found = tally([[1.0, 1.0], [1.0, 1.01]], [[1.0, 1.001], [1.0, 1.0]], first=700)
    worst = found.worst
    assert (worst.row, worst.position, worst.channel) == (3, 701, 1)
    assert worst.budget_fraction == pytest.approx(0.5, rel=1e-4)
    assert (found.failing, found.nonfinite, found.elements) == (0, 0, 4)


def test_one_failure_among_many_fails() -> None:
    output = torch.ones(50, 20)
    output[49, 19] = 1.1
    found = tally(output.tolist(), torch.ones(50, 20).tolist())
    assert (found.verdict, found.failing, found.worst.position, found.worst.channel) == ("fail", 1, 49, 19)


def test_a_nonfinite_element_is_worse_than_any_other() -> None:
    found = tally([[1e30, math.nan]], [[0.0, 0.0]])
    assert found.worst.channel == 1
    assert found.as_json()["worst"] | {"row": 3} == {
        "row": 3, "position": 0, "channel": 1, "output": "nan", "reference": 0.0, "budget_fraction": "inf"
    }  # fmt: skip


def test_tallies_add_up_to_the_tally_of_the_whole() -> None:
    output, reference = [[1.0, 2.0], [3.0, math.nan]], [[1.0, 2.5], [3.0, 4.0]]
    parts = tally(output[:1], reference[:1]) + tally(output[1:], reference[1:], first=1)
    whole = tally(output, reference)
    assert str(parts.as_json()) == str(whole.as_json())
    assert parts.failing == 2


def test_different_shapes_are_never_broadcast() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        tally([[1.0]], [[1.0, 1.0]])
