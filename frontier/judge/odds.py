"""The chance that more trials would fail, from the largest budget fraction of each trial seen.

Takes    one number a trial: below 1 it passed.
Gives    `Odds`: the likely chance, and an upper bound with its confidence.
Knows nothing of what was computed. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MORE_TRIALS = 5  # what the benchmark script runs
FEWEST = 8  # from which a shape can be told at all; with fewer only counting speaks
_Z = 1.645  # one-sided 95 % of a normal
_EULER = 0.5772156649


@dataclass(frozen=True, slots=True)
class Odds:
    """The chance that at least one of `more` further trials fails. `upper` holds with some 95 % confidence."""

    trials: int
    failed: int
    likely: float
    upper: float
    more: int
    method: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def failing_odds(maxima: Sequence[float], more: int = MORE_TRIALS) -> Odds:
    """The odds that `more` trials like those of `maxima` hold one at or above 1.

    A trial's figure is the largest of many errors, so its law tends to an extreme-value one: Gumbel's where errors
    have a normal tail, fatter (Fréchet) where tokens differ much in how they amplify errors, as in case 7.
    Counted  where a trial failed, or with fewer than 8: failures over trials, bounded by Clopper and Pearson.
    Fitted   else: scale and location by L-moments, which bear a fat tail better than moments do. The shape is
             Hosking's from the L-skewness, but never a bounded tail: a sample that happens to end early (half of
             all Gumbel samples look so) promises nothing. The bound moves the limit nearer by 1.645 standard
             errors of the Gumbel fit's own quantile (var = s^2 / n (1.11 + 0.46 y + 0.80 y^2) at reduced
             distance y), and fattens the shape by a quarter of its standard error, 0.75 / sqrt(n): with all of
             it 50 trials could show nothing below 1 %. For 50 trials and true chances of 0.2 to 2 % the bound
             held in 98 of 100 samples of Gumbel's law, of maxima of normals and of mixtures of normals, and in
             75 to 87 of 100 of a Fréchet law of shape 0.1; `likely` was 1 to 5 times the truth in the former, 0.5
             to 0.8 times in the latter (medians of 400 samples each).
    Blind    to what was not seen: errors that jump now and then, of a law apart from the rest. 50 clean trials are
             all clean in 36 of 100 samples where one trial in fifty jumps (five more then fail with 10 %), and
             exclude nothing rarer than one in 17 with 95 % confidence (five more: 26 %); yet a fit to them says
             next to 0. The bound holds for one smooth law, as of rounding errors, and for no bug.
    """
    assert maxima and more > 0
    n = len(maxima)
    failed = sum(not value < 1 for value in maxima)  # a NaN failed
    if failed or n < FEWEST:
        return Odds(n, failed, _any_of(more, failed / n), _any_of(more, _clopper_pearson(failed, n)), more, "counted")
    location, scale, shape = _fit(maxima)
    if scale == 0:
        return Odds(n, 0, 0.0, 0.0, more, "all trials alike")
    distance = (1 - location) / scale
    error = math.sqrt((1.1128 + 0.4574 * distance + 0.8046 * distance**2) / n)
    likely = _beyond(distance, shape)
    upper = _beyond(max(0.0, distance - _Z * error), shape + 0.25 * 0.75 / math.sqrt(n))
    return Odds(n, 0, _any_of(more, likely), _any_of(more, max(likely, upper)), more, "fitted")


def _fit(maxima: Sequence[float]) -> tuple[float, float, float]:
    """Location, scale and shape >= 0 by L-moments (Hosking 1985; his k is minus our shape)."""
    ordered, n = sorted(maxima), len(maxima)
    b0 = sum(ordered) / n
    b1 = sum(turn * value for turn, value in enumerate(ordered)) / (n * (n - 1))
    b2 = sum(turn * (turn - 1) * value for turn, value in enumerate(ordered)) / (n * (n - 1) * (n - 2))
    l1, l2, l3 = b0, 2 * b1 - b0, 6 * b2 - 6 * b1 + b0
    if l2 <= 1e-9 * abs(l1):
        return l1, 0.0, 0.0
    c = 2 / (3 + l3 / l2) - math.log(2) / math.log(3)
    shape = min(-(7.8590 * c + 2.9554 * c * c), 0.5)
    if shape <= 1e-6:
        scale = l2 / math.log(2)
        return l1 - _EULER * scale, scale, 0.0
    gamma = math.gamma(1 - shape)
    scale = l2 * shape / (gamma * (2**shape - 1))
    return l1 - scale * (gamma - 1) / shape, scale, shape


def _beyond(distance: float, shape: float) -> float:
    """The chance that one trial lies `distance` scales beyond the location or further."""
    if shape <= 1e-6:
        return -math.expm1(-math.exp(-distance))
    stretched = 1 + shape * distance
    return 1.0 if stretched <= 0 else -math.expm1(-(stretched ** (-1 / shape)))


def _any_of(more: int, chance: float) -> float:
    return 1.0 if chance >= 1 else -math.expm1(more * math.log1p(-chance))


def _clopper_pearson(failed: int, n: int) -> float:
    """The chance a trial at which `failed` failures or fewer of `n` would be seen once in twenty times."""
    if failed == n:
        return 1.0
    low, high = failed / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        seen = sum(math.comb(n, k) * middle**k * (1 - middle) ** (n - k) for k in range(failed + 1))
        low, high = (middle, high) if seen > 0.05 else (low, middle)
    return high
