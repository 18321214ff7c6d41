"""The judge is judged: planted cheats are caught by a few trials, and an honest program is not."""

from typing import Any

import pytest
from cheats import CHEATS, CPU, MASK_CHEATS, case_of, honest

from frontier import gating
from frontier.gating import gate
from frontier.judge.promotion import GateReport

QUICK: dict[str, Any] = {"trials": 3, "seeds": 1, "input_scales": (1.0,), "adversarial": False}


def judged(make: Any, **options: Any) -> GateReport:
    return gate(case_of(), CPU, make, **{**QUICK, "padding": (0.0,), **options})


@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_an_honest_program_passes(padding: float) -> None:
    report = judged(honest, padding=(padding,))
    assert report.passes and report.worst is not None and report.worst.exact.budget == pytest.approx(0, abs=1e-3)
    assert judged(honest, adversarial=True).passes


@pytest.mark.parametrize("name", CHEATS)
def test_each_cheat_is_caught(name: str) -> None:
    assert not judged(CHEATS[name]).passes


@pytest.mark.parametrize("name", [name for name in CHEATS if "all true" not in name])
def test_most_cheats_are_caught_by_the_first_trial(name: str) -> None:
    """Because a call on other rows in the same buffers comes before it."""
    assert not judged(CHEATS[name], trials=1).passes


@pytest.mark.parametrize("name", MASK_CHEATS)
def test_each_cheat_on_masks_is_caught_where_there_are_masks(name: str) -> None:
    assert judged(MASK_CHEATS[name], trials=1).passes, "the first trial passes None"
    assert not judged(MASK_CHEATS[name], padding=(0.3,)).passes
    stressed = judged(MASK_CHEATS[name], adversarial=True)
    assert not any(condition.holds for condition in stressed.conditions if condition.name.startswith("adversarial"))


def test_a_changed_input_is_named() -> None:
    report = judged(CHEATS["one sign of its input flipped"])
    assert report.worst is not None and report.worst.exact.passes, "the output itself is right"
    assert report.worst.faults == ("the input was changed",)
    assert report.as_dict()["groups"][0]["faults"] == ["the input was changed"]


def test_the_worst_element_is_named() -> None:
    worst = judged(CHEATS["one element off"]).worst
    assert worst is not None
    told = worst.exact
    assert (told.row, told.position, told.channel, told.failing) == (1, 2, 3, 1)
    assert told.got is not None and told.wanted is not None and told.got - told.wanted == pytest.approx(0.05, abs=1e-4)


def test_memory_left_from_an_equal_trial_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same rows in every trial, what lies in the output from the call before would be right."""
    rows = gating.normal_rows
    same = lambda shape, generator, scale=1.0: rows(shape, generator.manual_seed(1), scale)  # noqa: E731
    monkeypatch.setattr(gating, "normal_rows", same)
    assert judged(CHEATS["remembered by the input's address"]).passes, "the rows are the same indeed"
    assert not judged(_writes_once()).passes


def _writes_once() -> Any:
    def make(state: Any, case: Any, device: Any) -> Any:
        true, seen = honest(state, case, device), []

        def program(x_BSD: Any, out_BSD: Any, valid_BS: Any = None) -> None:
            if not seen:
                true(x_BSD, out_BSD, valid_BS)
            seen.append(1)

        return program

    return make
