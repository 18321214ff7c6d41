"""Each condition of promotion holds for a good recipe and falls by one planted fault; no excuse for what is worse."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from frontier.judge.gate import Verdict
from frontier.judge.promotion import Group, Trial, conditions, grouped


def verdict(budget: float) -> Verdict:
    return Verdict(elements=100, failing=int(budget >= 1), budget=budget)


def drawn(
    scale: float = 1.0, exact: float = 0.4, script: float = 0.5, noise: float = 0.4, spread: float = 0.02, **fields: Any
) -> list[Trial]:
    """Fifty trials on two seeds whose budgets lie about the given ones."""
    random = np.random.default_rng(0)
    made = []
    for number in range(50):
        told = {
            name: verdict(float(value * (1 + random.gumbel(0, spread))))
            for name, value in (("exact", exact), ("script", script), ("noise", noise))
        }
        made.append(
            Trial(
                **{
                    "scale": scale,
                    "padding": 0.0,
                    "stress": None,
                    "seed": number // 25,
                    "number": number,
                    **told,
                    **fields,
                }
            )
        )
    return made


STRESSED = [Trial(scale=1, padding=0, stress="ties", seed=0, number=0, exact=verdict(0.5))]
GOOD = [*drawn(), *drawn(scale=10, exact=0.05, script=0.05, noise=0.05), *STRESSED]


def unmet(trials: list[Trial]) -> list[str]:
    return [condition.name for condition in conditions(grouped(trials)) if not condition.holds]


def spoilt(trials: list[Trial], place: int, **fields: Any) -> list[Trial]:
    return [*trials[:place], dataclasses.replace(trials[place], **fields), *trials[place + 1 :]]


def test_a_good_recipe_is_promoted() -> None:
    assert unmet(GOOD) == []


@pytest.mark.parametrize(
    ("trials", "falls"),
    [
        (spoilt(GOOD, 7, exact=verdict(1.0)), ["usual inputs pass the exact reference", "headroom"]),
        (spoilt(GOOD, 7, faults=("the input was changed",)), ["usual inputs pass the exact reference"]),
        (spoilt(GOOD, 60, exact=verdict(1.1)), ["other scales pass the exact reference"]),
        (spoilt(GOOD, 60, script=verdict(1.1)), ["the script's reference"]),
        (spoilt(GOOD, 100, exact=verdict(1.1)), ["adversarial inputs and masks"]),
        (GOOD[:100], ["adversarial inputs and masks"]),
        (GOOD[:49] + GOOD[50:], ["trials enough to tell"]),
        ([dataclasses.replace(trial, seed=0) for trial in GOOD], ["trials enough to tell"]),
        (spoilt(GOOD, 7, exact=verdict(0.81)), ["headroom"]),
        ([*drawn(script=0.8, spread=0.065), *GOOD[50:]], ["chance that five more trials fail"]),
        (GOOD[50:], [
            "usual inputs pass the exact reference", "trials enough to tell", "headroom",
            "chance that five more trials fail",
        ]),
        (spoilt(GOOD, 7, script=verdict(1.2)), ["the script's reference", "chance that five more trials fail"]),
    ],
)  # fmt: skip
def test_each_condition_falls_by_one_fault(trials: list[Trial], falls: list[str]) -> None:
    assert unmet(trials) == falls


def test_odds_no_worse_than_those_of_exact_float32_are_enough() -> None:
    noisy = [*drawn(script=0.8, noise=0.8, spread=0.065), *GOOD[50:]]
    as_noisy = [dataclasses.replace(trial, noise=trial.script) for trial in noisy]
    assert unmet(as_noisy) == []
    better = [dataclasses.replace(trial, noise=verdict(0.95 * trial.script.budget)) for trial in noisy if trial.script]
    assert unmet([*better, *STRESSED]) == ["chance that five more trials fail"]


def failing(own: int, theirs: int) -> list[Trial]:
    """Fifty trials of which exact float32 fails `own` against the script's reference, the recipe `theirs`."""
    trials = drawn(scale=0.01, exact=0.5, script=1.4, noise=1.3)
    for count, name in ((own, "noise"), (theirs, "script")):
        trials = [
            trial if number < count else dataclasses.replace(trial, **{name: verdict(0.9)})
            for number, trial in enumerate(trials)
        ]
    return trials


def test_a_failure_more_or_less_than_float32s_is_chance() -> None:
    for theirs in (1, 9, 10, 15):
        [group] = grouped(failing(own=9, theirs=theirs))
        assert group.excused and group.passes, theirs


def test_where_exact_float32_fails_the_scripts_reference_the_exact_one_judges() -> None:
    trials = drawn(scale=0.01, exact=0.5, script=1.4, noise=1.3)
    [group] = grouped(trials)
    assert group.failed_script == 50 == group.failed_noise and group.excused and group.passes
    [condition] = [c for c in conditions([group]) if c.name == "the script's reference"]
    assert condition.holds and "not judged so: exact float32 fails 50 of 50" in condition.why


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        (drawn(scale=0.01, exact=1.2, script=1.4, noise=1.3), "it fails the exact reference"),
        (drawn(scale=0.01, exact=0.5, script=1.4, noise=0.9), "float32 passes"),
        (failing(own=9, theirs=16), "it fails more trials than two deviations of counting 9 explain"),
        (drawn(scale=0.01, exact=0.85, script=1.4, noise=1.3), "it keeps no headroom to the exact reference"),
        (
            spoilt(drawn(scale=0.01, exact=0.5, script=1.4, noise=1.3), 3, faults=("the input was changed",)),
            "an input was changed",
        ),
    ],
)
def test_what_is_worse_than_exact_float32_is_never_excused(trials: list[Trial], why: str) -> None:
    [group] = grouped(trials)
    assert not group.excused and not group.passes, why


def test_without_tf32_the_exact_reference_serves_for_both() -> None:
    trials = [dataclasses.replace(trial, script=None, noise=None) for trial in GOOD]
    assert unmet(trials) == []
    near = [dataclasses.replace(trial, script=None, noise=None) for trial in drawn(exact=0.72, spread=0.1)]
    assert "chance that five more trials fail" in unmet([*near, *trials[50:]])
    failing = spoilt(trials, 3, exact=verdict(1.2))
    assert {"usual inputs pass the exact reference", "the script's reference"} <= {*unmet(failing)}


def test_a_few_trials_are_no_evidence_of_the_odds() -> None:
    assert "chance that five more trials fail" in unmet([*GOOD[:5], *GOOD[50:]])


def test_trials_that_differ_in_seeds_alone_are_one_group() -> None:
    groups = grouped([*GOOD, *drawn(padding=0.3)])
    assert [group.name for group in groups] == [
        "scale 1, padding 0",
        "scale 10, padding 0",
        "ties",
        "scale 1, padding 0.3",
    ]
    worst = Group(tuple(drawn())).worst("exact")
    assert worst is not None and worst.exact.budget == max(groups[0].budgets("exact"))
