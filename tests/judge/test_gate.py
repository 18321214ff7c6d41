"""The gate judges as the contract says, element by element, and as the referee does; each loosening would be seen."""

import math

import pytest
import torch

from frontier.judge import gate
from frontier.judge.gate import Verdict, compare

ATOL, RTOL = 2e-3, 2e-2


def judge_one(got: float, wanted: float, atol: float = ATOL, rtol: float = RTOL) -> Verdict:
    pair = (torch.tensor([[value]], dtype=torch.float64) for value in (got, wanted))
    return compare(*pair, atol, rtol, row=3)


@pytest.mark.parametrize(
    ("got", "wanted", "passes"),
    [
        (0.0, 0.0, True),
        (0.00199, 0.0, True),  # below atol
        (0.00201, 0.0, False),
        (1.0199, 1.0, True),  # below rtol
        (1.0201, 1.0, False),
        (1.0219, 1.0, False),  # what isclose, which adds the two bounds, would let pass
        (-1.0199, -1.0, True),
        (0.1021, 0.1, False),  # above both: 0.0021 against 0.002 and 0.002
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (-math.inf, 1.0, False),
        (1.0, math.inf, False),
    ],
)
def test_an_element_passes_only_under_either_bound_and_finite(got: float, wanted: float, passes: bool) -> None:
    verdict = judge_one(got, wanted)
    assert verdict.passes is passes
    assert (verdict.budget < 1) is passes
    assert verdict.nonfinite == (0 if math.isfinite(got) and math.isfinite(wanted) else 1)


@pytest.mark.parametrize(("atol", "rtol", "error"), [(0.25, 1e-9, 0.25), (1e-9, 0.25, 0.25)])
def test_an_error_of_exactly_the_bound_fails(atol: float, rtol: float, error: float) -> None:
    assert not judge_one(1 + error, 1.0, atol, rtol).passes
    assert judge_one(1 + error / 2, 1.0, atol, rtol).passes


def test_the_worst_place_is_named_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BLOCK_ELEMENTS", 20)
    wanted_SD = torch.randn(37, 5, dtype=torch.float64)
    got_SD = wanted_SD.clone()
    got_SD[29, 2] += 0.5
    got_SD[3, 1] += 0.001
    verdict = compare(got_SD, wanted_SD, ATOL, RTOL, row=7)
    assert (verdict.row, verdict.position, verdict.channel) == (7, 29, 2)
    assert (verdict.elements, verdict.failing) == (37 * 5, 1)
    assert verdict.got == float(got_SD[29, 2]) and verdict.wanted == float(wanted_SD[29, 2])


def test_verdicts_add_up_and_keep_the_worst_place() -> None:
    mild, bad = judge_one(1.001, 1.0), judge_one(2.0, 1.0)
    for total in (mild + bad, bad + mild, Verdict() + mild + bad):
        assert (total.elements, total.failing, total.got) == (2, 1, 2.0)
        assert not total.passes
    assert (mild + mild).passes
    assert not Verdict().passes, "nothing judged is nothing passed"


def test_the_gate_agrees_with_the_referee_on_random_and_edge_values() -> None:
    from referee.compare import compare as referee_compare

    generator = torch.Generator().manual_seed(5)
    wanted = torch.randn(400, 8, generator=generator) * 10 ** torch.randint(-4, 3, (400, 8), generator=generator)
    got = wanted + torch.randn(400, 8, generator=generator) * 1.2e-3
    got[17, 3], got[18, 4], wanted[19, 5] = math.nan, math.inf, 0.0
    ours = compare(got, wanted, ATOL, RTOL, row=0)
    theirs = referee_compare(got, wanted.double(), torch.arange(400), 0, ATOL, RTOL).as_json()
    assert 0 < ours.failing < 3200
    assert (ours.elements, ours.failing, ours.nonfinite) == (
        theirs["elements"], theirs["failing"], theirs["nonfinite"],
    )  # fmt: skip
