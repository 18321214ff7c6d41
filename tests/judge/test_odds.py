"""The odds are near the truth on laws that are known, and their bound holds as often as it says."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from frontier.judge.odds import Odds, failing_odds

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def gumbel(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.gumbel(size=shape)


def frechet(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of shape 0.1: a fatter tail than any that was seen."""
    return ((-np.log(random.random(shape))) ** -0.1 - 1) / 0.1


def largest_normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.abs(random.standard_normal((*shape, 1000))).max(-1)


def largest_of_mixture(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Errors of tokens that amplify differently, as in case 7."""
    amplified = random.standard_normal((*shape, 1000)) * np.exp(0.2 * random.standard_normal((*shape, 1000)))
    return np.abs(amplified).max(-1)


LAWS: dict[str, Draw] = {f.__name__: f for f in (gumbel, frechet, largest_normal, largest_of_mixture)}


def samples_with(true_chance: float, draw: Draw, samples: int, trials: int = 50) -> list[Odds]:
    """Odds from many samples of a law, moved so that five more trials fail with `true_chance`."""
    random = np.random.default_rng(7)
    many = 20_000 if draw in (largest_normal, largest_of_mixture) else 400_000
    limit = np.quantile(draw(random, (many,)), (1 - true_chance) ** (1 / 5))
    return [failing_odds(list((row - limit) / 20 + 1)) for row in draw(random, (samples, trials))]


@pytest.mark.parametrize(("law", "held"), [("gumbel", 0.95), ("largest_normal", 0.95), ("largest_of_mixture", 0.95)])
def test_the_bound_holds_for_50_samples_of_what_theory_expects(law: str, held: float) -> None:
    odds = samples_with(0.01, LAWS[law], 200)
    assert np.mean([o.upper >= 0.01 for o in odds]) >= held
    # Pessimistic by a few times where no trial comes near, and never absurdly optimistic.
    assert 0.005 < np.median([o.likely for o in odds]) < 0.05
    assert np.quantile([o.likely for o in odds], 0.05) > 0.001


def test_a_fat_tail_is_not_taken_for_a_thin_one() -> None:
    odds = samples_with(0.01, frechet, 200)
    assert np.mean([o.upper >= 0.01 for o in odds]) >= 0.75
    assert np.median([o.likely for o in odds]) > 0.003
    # A Gumbel law through the same mean and spread would say less than a third of that.
    fits = [row for row in frechet(np.random.default_rng(1), (200, 50))]
    thin = [1 - math.exp(-5 * math.exp(-(4.5 - (r.mean() - 0.45 * r.std())) / (0.78 * r.std()))) for r in fits]
    fat = [failing_odds(list((r - 4.5) / 20 + 1)).likely for r in fits]
    assert np.median(thin) < np.median(fat)


def test_a_law_far_below_the_limit_is_promotable_and_one_near_it_is_not() -> None:
    assert np.mean([o.likely < 0.01 for o in samples_with(5e-4, gumbel, 200)]) > 0.85
    assert np.mean([o.likely < 0.01 for o in samples_with(0.10, gumbel, 100)]) < 0.05


def test_more_trials_tighten_the_bound() -> None:
    few, many = (np.median([o.upper for o in samples_with(0.005, gumbel, 60, n)]) for n in (25, 400))
    assert 0.005 < many < few / 2


def test_failures_are_counted() -> None:
    odds = failing_odds([0.5] * 48 + [1.2, math.inf])
    assert (odds.failed, odds.method) == (2, "counted")
    assert odds.likely == pytest.approx(1 - 0.96**5)
    # Clopper and Pearson, one-sided 95 %: 2 of 50 may come of 12.06 %.
    assert odds.upper == pytest.approx(1 - (1 - 0.1206) ** 5, rel=1e-3)
    assert failing_odds([math.nan] * 9).likely == 1.0 == failing_odds([2.0]).upper


def test_a_few_trials_prove_nothing() -> None:
    odds = failing_odds([0.1] * 5)
    assert odds.likely == 0 and odds.upper == pytest.approx(1 - 0.05)  # five passes bound five more by 95 %
    assert failing_odds([0.1] * 50).method == "all trials alike"


def test_a_trial_at_exactly_the_limit_failed() -> None:
    assert failing_odds([0.2] * 20 + [1.0]).failed == 1


def test_clean_trials_cannot_exclude_rare_jumps_as_the_docstring_says() -> None:
    """So that nobody reads more into the bound: a law that jumps over the limit once in fifty trials."""
    random = np.random.default_rng(11)
    clean = [row for row in random.gumbel(0.3, 0.03, (200, 50)) if random.random() < 0.98**50]
    assert 0.25 < len(clean) / 200 < 0.47
    assert max(failing_odds(list(row)).upper for row in clean) < 0.01 < 1 - 0.98**5
    assert "exclude nothing rarer than one in 17" in str(failing_odds.__doc__)
    assert abs((1 - 1 / 17) ** 50 - 0.05) < 0.003


def test_odds_do_not_depend_on_the_order() -> None:
    values = list(np.random.default_rng(3).gumbel(0.5, 0.05, 50))
    assert failing_odds(values) == failing_odds(values[::-1])


@pytest.mark.parametrize("closer", [0.0, 0.1, 0.2])
def test_larger_errors_never_lower_the_chance(closer: float) -> None:
    values = np.random.default_rng(5).gumbel(0.5, 0.04, 50)
    chances = [failing_odds(list(values + closer + step)).likely for step in (0, 0.03, 0.06)]
    assert chances == sorted(chances) and chances[0] < chances[-1]
