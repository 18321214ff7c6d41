"""Whether what was seen in a gate's trials lets a recipe be promoted: each condition named, with its reason.

Takes    trials, each with its verdicts.
Gives    groups of like trials, conditions that hold or do not, the report of a whole gate.
Knows nothing of how a trial was run.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from frontier.case import Case
from frontier.judge.gate import Verdict, finite_or_name
from frontier.judge.odds import FEWEST, Odds, failing_odds
from frontier.recipe import Recipe

HEADROOM_BUDGET = 0.8  # of the exact reference's budget
LARGEST_CHANCE = 0.01
NEEDED_TRIALS, NEEDED_SEEDS = 25, 2
# The whole stress program draws inputs at each of these scales with each of these padded shares.
INPUT_SCALES = (1e-3, 1e-2, 1.0, 10.0, 100.0)
PADDING = (0.0, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One call, judged on every element.

    exact    against float32 without TF32; where that itself is ill-conditioned (`judged_by`), against float64
    script   against float32 with TF32, as the benchmark script computes; None where TF32 does not exist
    noise    exact float32 judged against that same reference: what the reference itself spends
    faults   what no comparison shows: an input that was changed
    """

    scale: float
    padding: float
    stress: str | None
    seed: int
    number: int
    exact: Verdict
    script: Verdict | None = None
    noise: Verdict | None = None
    judged_by: str = "float32"
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.stress or f"scale {self.scale:g}, padding {self.padding:g}"

    @property
    def passes_exact(self) -> bool:
        return self.exact.passes and not self.faults


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that differ in nothing but seeds."""

    trials: tuple[Trial, ...]

    @property
    def name(self) -> str:
        return self.trials[0].name

    @property
    def is_usual(self) -> bool:
        """Inputs as the benchmark script draws them by default: scale 1, padded or not."""
        return self.trials[0].stress is None and self.trials[0].scale == 1

    @property
    def failed_exact(self) -> int:
        return sum(not trial.passes_exact for trial in self.trials)

    @property
    def failed_script(self) -> int:
        """By the script's reference; where it is not another than the exact one, on a CPU, by that."""
        return sum(not (trial.script.passes if trial.script else trial.passes_exact) for trial in self.trials)

    @property
    def failed_noise(self) -> int:
        return sum(not trial.noise.passes for trial in self.trials if trial.noise)

    @property
    def excused(self) -> bool:
        """Whether failures against the script's reference are that reference's own.

        It is no judge where exact float32 fails against it (with inputs scaled to 0.1 and below, operands rounded
        as TF32 does alone spend 1.2 to 1.7 budgets in cases 4 and 7); there the exact reference judges alone, and
        more strictly: each trial keeps the headroom. Never an excuse for what is worse than exact float32: no more
        trials may fail the script's than float32's do, but for two standard deviations of such a count.
        """
        spent = max(self.budgets("exact"), default=0.0)
        most = self.failed_noise + 2 * math.sqrt(self.failed_noise)
        return not self.failed_exact and spent <= HEADROOM_BUDGET and 0 < self.failed_script <= most

    @property
    def passes(self) -> bool:
        return not self.failed_exact and (not self.failed_script or self.excused)

    def budgets(self, by: str) -> list[float]:
        """The largest budget fraction of each trial, by `exact`, `script` or `noise`; empty where there is none."""
        return [verdict.budget for trial in self.trials if (verdict := getattr(trial, by)) is not None]

    def odds(self, by: str) -> Odds:
        """Of five more trials failing, by `exact`, `script` or `noise`."""
        return failing_odds(self.budgets(by))

    def worst(self, by: str) -> Trial | None:
        judged = [trial for trial in self.trials if getattr(trial, by) is not None]
        return max(judged, key=lambda trial: getattr(trial, by).budget, default=None)

    def as_dict(self) -> dict[str, Any]:
        first = self.trials[0]
        told: dict[str, Any] = {"name": self.name, "scale": first.scale, "padding": first.padding}
        told |= {"stress": first.stress, "trials": len(self.trials), "passes": self.passes, "excused": self.excused}
        told |= {"judged_by": first.judged_by, "faults": sorted({f for trial in self.trials for f in trial.faults})}
        for by in ("exact", "script", "noise"):
            if worst := self.worst(by):
                place = {"seed": worst.seed, "number": worst.number}
                told[by] = {
                    "failed": getattr(self, f"failed_{by}"),
                    "budgets": [finite_or_name(round(budget, 4)) for budget in self.budgets(by)],
                    "worst": getattr(worst, by).as_dict() | place,
                }
                if first.stress is None:
                    told[by]["odds"] = self.odds(by).as_dict()
        return told


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of promotion: whether it holds, and the numbers it was judged by."""

    name: str
    holds: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What a gate saw. `recipe` is None where a bare program was judged."""

    case: Case
    recipe: Recipe | None
    machine: str
    trials: tuple[Trial, ...]
    has_tf32: bool
    masked_rows: int

    @property
    def groups(self) -> list[Group]:
        return grouped(self.trials)

    @property
    def passes(self) -> bool:
        """Every trial that was made passed; where exact float32 fails the script's reference, see `Group.excused`."""
        return bool(self.trials) and all(group.passes for group in self.groups)

    @property
    def conditions(self) -> list[Condition]:
        return [*conditions(self.groups), _whole(self.groups)]

    @property
    def promotable(self) -> bool:
        """Every condition of promotion holds; needs the whole stress program."""
        return all(condition.holds for condition in self.conditions)

    @property
    def reasons(self) -> list[str]:
        """Why not, a sentence a condition; empty when promotable."""
        return [f"{condition.name}: {condition.why}" for condition in self.conditions if not condition.holds]

    @property
    def budget(self) -> float:
        """The largest fraction of the exact reference's budget that usual inputs spent; 0 if none was tried."""
        return max((b for group in self.groups if group.is_usual for b in group.budgets("exact")), default=0.0)

    @property
    def worst(self) -> Trial | None:
        """The trial that spent most of its exact budget; a changed input counts as more than any."""
        return max(self.trials, key=lambda t: (bool(t.faults), t.exact.budget), default=None)

    def as_dict(self) -> dict[str, Any]:
        """All of it for a record, as strict JSON has it: maxima of each trial, worst elements, odds, conditions."""
        worst = self.worst
        return {
            "verdict": "pass" if self.passes else "fail",
            "promotable": self.promotable,
            "reasons": self.reasons,
            "budget": finite_or_name(self.budget),
            "conditions": [asdict(condition) for condition in self.conditions],
            "case": self.case.as_dict(),
            "recipe": None if self.recipe is None else str(self.recipe),
            "machine": self.machine,
            "has_tf32": self.has_tf32,
            "masked_rows": self.masked_rows,
            "worst": None if worst is None else worst.exact.as_dict() | {"trial": worst.name, "faults": worst.faults},
            "groups": [group.as_dict() for group in self.groups],
        }


def grouped(trials: Iterable[Trial]) -> list[Group]:
    """Trials of one scale and padding, or of one stress, together; in the order in which they came."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.name, []).append(trial)
    return [Group(tuple(members)) for members in found.values()]


def conditions(groups: list[Group]) -> list[Condition]:
    """The conditions on trials that were made, in the order in which people ask; a report adds that all were.

    A condition on trials that were not made does not hold: promotion needs the whole stress program.
    """
    drawn = [group for group in groups if group.trials[0].stress is None]
    usual = [group for group in drawn if group.is_usual]
    others = [group for group in drawn if not group.is_usual]
    stressed = [group for group in groups if group.trials[0].stress is not None]
    return [
        _all_pass("usual inputs pass the exact reference", usual, lambda g: g.failed_exact),
        _all_pass("other scales pass the exact reference", others, lambda g: g.failed_exact),
        _all_pass("the script's reference", drawn, lambda g: 0 if g.excused else g.failed_script),
        _all_pass("adversarial inputs and masks", stressed, lambda g: g.failed_exact),
        _enough(usual),
        _headroom(usual),
        _odds(usual),
    ]


def _all_pass(name: str, groups: list[Group], failed: Callable[[Group], int]) -> Condition:
    if not groups:
        return Condition(name, False, "no such trial was made")
    made = sum(len(group.trials) for group in groups)
    faulty = [f"{failed(group)} of {len(group.trials)} at {group.name}" for group in groups if failed(group)]
    excused = [
        f"at {group.name} not judged so: exact float32 fails {group.failed_noise} of {len(group.trials)}"
        for group in groups
        if group.excused and not failed(group)
    ]
    return Condition(name, not faulty, "; ".join([*faulty, *excused]) or f"all of {made} trials pass")


def _whole(groups: list[Group]) -> Condition:
    made = {(group.trials[0].scale, group.trials[0].padding) for group in groups if group.trials[0].stress is None}
    missing = [(scale, share) for scale in INPUT_SCALES for share in PADDING if (scale, share) not in made]
    why = f"no such trial was made at scale {missing[0][0]:g}, padding {missing[0][1]:g}" if missing else "all are here"
    return Condition("each scale and padding of the stress program", not missing, why)


def _enough(usual: list[Group]) -> Condition:
    trials = min((len(group.trials) for group in usual), default=0)
    seeds = min((len({trial.seed for trial in group.trials}) for group in usual), default=0)
    enough = trials >= NEEDED_TRIALS * NEEDED_SEEDS and seeds >= NEEDED_SEEDS
    return Condition(
        "trials enough to tell",
        enough,
        f"{trials} on {seeds} seed{'s' * (seeds != 1)} at scale 1, needs {NEEDED_TRIALS} x {NEEDED_SEEDS}",
    )


def _headroom(usual: list[Group]) -> Condition:
    most = max((budget for group in usual for budget in group.budgets("exact")), default=float("inf"))
    why = f"the largest error at scale 1 spends {most:.3f} of the exact reference's budget, at most {HEADROOM_BUDGET}"
    return Condition("headroom", most <= HEADROOM_BUDGET, why)


def _odds(usual: list[Group]) -> Condition:
    """Against the reference that the script would use here, and against what exact float32 would risk there."""
    told: list[str] = []
    holds = bool(usual)
    for group in usual:
        odds = group.odds("script" if group.budgets("script") else "exact")
        text = f"padding {group.trials[0].padding:g}: {odds.likely:.2%} (at most {odds.upper:.2%})"
        fine = odds.likely < LARGEST_CHANCE
        if group.budgets("noise"):
            own = group.odds("noise")
            text += f", exact float32 {own.likely:.2%} (at most {own.upper:.2%})"
            fine = fine or (odds.likely <= own.likely and odds.upper <= own.upper)
        # A few trials without a failure say nothing yet, of either.
        holds, told = holds and fine and odds.trials >= FEWEST, [*told, text]
    return Condition("chance that five more trials fail", holds, "; ".join(told) or "no such trial was made")
