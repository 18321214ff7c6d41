"""Tries every recipe of a case on a device, under the gate, and leaves one record of each outcome.

Takes    cases, a machine, a judge, the file of what is known.
Gives    records: passed, failed with its worst element, refused with its reason, out of memory.
Knows nothing of how calls are timed or what the gate asks.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from frontier import tuned
from frontier.bench import Bench, Measured, NoTimes, first_line
from frontier.candidates import candidates
from frontier.case import Case
from frontier.errors import DoesNotFit, Unsupported
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.record import EvidenceFile, Record
from frontier.runner import facts_of_now
from frontier.timelock import timing_window
from frontier.timing import copy_gbps, float32_peak_tflops, gemm_tflops

# Every recipe is screened by a few plain trials and timed; the fastest then go through the whole stress program.
SCREEN: dict[str, Any] = {"trials": 3, "seeds": 1, "input_scales": (1.0,), "padding": (0.0,), "adversarial": False}
STRESS: dict[str, Any] = {"trials": 25, "seeds": 2, "until_failure": True}  # and the gate's own scales, all of them
log = logging.getLogger(__name__)


class Report(Protocol):
    """What the gate says of a recipe."""

    @property
    def passes(self) -> bool: ...
    @property
    def promotable(self) -> bool: ...
    def as_dict(self) -> dict[str, Any]: ...


Judge = Callable[..., Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a caller may choose.

    stress      the size of the whole stress program: the gate's own arguments
    finalists   how many recipes must pass it: the choice, and what it steps down to
    recipes     instead of the table's
    without     words whose recipes are left out of the table
    yardstick   whether each is timed beside compiled plain layers too, which take up to minutes to build
    again       do what this very source has done already
    warm        use the compile caches that lie there; no first results are told then
    """

    stress: dict[str, Any] = field(default_factory=lambda: dict(STRESS))
    rounds: int = 6
    finalists: int = 2
    recipes: tuple[Recipe, ...] = ()
    without: tuple[str, ...] = ()
    yardstick: bool = True
    again: bool = False
    warm: bool = False
    commit: str | None = None


def tune(
    cases: Sequence[Case], machine: Machine, evidence: EvidenceFile, judge: Judge, choices: Choices
) -> Iterator[Record]:
    """Each outcome, as soon as it is safe in the evidence. What this source has done already is not done again.

    Raises   InUse if somebody times or computes on the device; DoesNotFit if a case's dense baseline does not fit.
    """
    with timing_window(machine):
        facts = facts_of_now(machine)
        facts |= {"commit": choices.commit or facts["commit"]}
        walls = _walls(machine)
        for case in cases:
            yield from _Tuning(case, machine, evidence, judge, choices, facts, walls).outcomes()


def _walls(machine: Machine) -> dict[str, float | None]:
    """The device's own ceilings, seen in this very run."""
    if not machine.has_card:
        return {}
    device = torch.device(machine.device)
    return {
        "gemm_tflops": gemm_tflops(device),
        "copy_gbps": copy_gbps(device),
        "float32_peak_tflops": float32_peak_tflops(machine),
    }


class _Tuning:
    """One case from its first candidate to its last finalist."""

    def __init__(
        self,
        case: Case,
        machine: Machine,
        evidence: EvidenceFile,
        judge: Judge,
        choices: Choices,
        facts: dict[str, Any],
        walls: dict[str, Any],
    ) -> None:
        self.case, self.machine, self.evidence, self.judge = case, machine, evidence, judge
        self.choices, self.facts, self.walls = choices, facts, walls
        self.wanted = tuple(
            recipe
            for recipe in choices.recipes or candidates(case, machine.has_card)
            if not set(choices.without) & set(str(recipe).split("/"))
        )
        self.wanted_texts = {str(recipe) for recipe in self.wanted}
        # What may be kept of earlier work: with --again nothing, of a pass by fewer trials than are asked nothing.
        done = [] if choices.again else list(filter(self._is_done, self._known()))
        self.kept = {r.recipe: r for r in done}

    def outcomes(self) -> Iterator[Record]:
        """Every recipe screened and timed; then, fastest first, through the whole stress program."""
        untried = [recipe for recipe in self.wanted if str(recipe) not in self.kept]
        if not untried and self._finalist() is None:
            return
        with Bench(self.case, self.machine, self.choices.rounds, self.choices.warm) as self.bench:
            if self.choices.yardstick and self.machine.has_card and (reason := self.bench.keep_yardstick()):
                if not self.bench.is_usable():
                    told = (
                        f"{self.machine.device} answers no more after the yardstick of case {self.case.name}: {reason}"
                    )
                    raise Unsupported(told, hint="tune it with --no-yardstick")
                log.warning("case %s is timed without the yardstick: %s", self.case.name, reason)
                self.walls = {**self.walls, "no_yardstick": reason}
            for recipe in untried:
                yield self._try(recipe, "screen")
            while (finalist := self._finalist()) is not None:
                best = tuned.ranking(self._known())
                if best:
                    self.bench.keep(parse_recipe(best[0].recipe, REFERENCE))
                yield self._try(finalist, "stress")

    def _known(self) -> list[Record]:
        return tuned.of_call(tuned.tuned(self.evidence.records, self.machine.name), self.case)

    def _is_done(self, record: Record) -> bool:
        """By this very source; and what passed the stress program, by as many trials as are asked now."""
        asked, notes = self.choices.stress["trials"] * self.choices.stress["seeds"], record.notes
        is_short = notes["stage"] == "stress" and notes["outcome"] == "pass" and notes["trials"] < asked
        return record.source_sha256 == str(self.facts["source_sha256"]) and not is_short

    def _finalist(self) -> Recipe | None:
        """The fastest that was screened only, unless enough faster ones have passed the whole program."""
        screened = [r for r in self.kept.values() if r.notes["stage"] == "screen" and r.notes["outcome"] == "pass"]
        fastest = min(screened, key=tuned.call_ms, default=None)
        if fastest is None:
            return None
        # Of a recipe that is tried now, what another source's kernels passed counts no more.
        rivals = [r for r in tuned.ranking(self._known()) if self._is_done(r) or r.recipe not in self.wanted_texts]
        faster = sum(tuned.call_ms(rival) < tuned.call_ms(fastest) for rival in rivals)
        return parse_recipe(fastest.recipe, REFERENCE) if faster < self.choices.finalists else None

    def _try(self, recipe: Recipe, stage: str) -> Record:
        earlier = self.kept.get(str(recipe))
        notes: dict[str, Any] = {"stage": stage, "noise": self.bench.noise, "promotable": False}
        asked = SCREEN if stage == "screen" else self.choices.stress
        notes |= {"trials": asked["trials"] * asked["seeds"], **self.walls}
        found: dict[str, Any] = {"notes": notes}
        try:
            found |= _facts_of(self.bench.measure(recipe), earlier)
            report = self._judged(recipe, asked)
            verdict = "pass" if report.passes else "fail"
            found["verdicts"] = {"gate": _told(report, stage) | {"verdict": verdict}}
            notes |= {"outcome": verdict, "promotable": stage == "stress" and report.passes and report.promotable}
        except NoTimes as reason:
            found["refused"] = str(reason)
            notes["outcome"] = reason.outcome
        record = Record(
            kind="tune", **self.facts, case=self.case.as_dict(), recipe=str(recipe), flops=self.case.flops, **found
        )
        self._keep(record)
        if notes["outcome"] == "failed" and not self.bench.is_usable():
            raise Unsupported(
                f"{self.machine.device} answers no more after {recipe} on case {self.case.name}: {record.refused}",
                hint="run the same command again: it goes on behind this recipe",
            )
        return record

    def _judged(self, recipe: Recipe, asked: dict[str, Any]) -> Report:
        try:
            with self.bench.caches_of(recipe):
                return self.judge(self.case, self.machine, recipe, **asked)
        except (torch.OutOfMemoryError, DoesNotFit) as error:
            raise NoTimes("out of memory", f"in the gate: {first_line(error)}") from None
        except Exception as error:  # a kernel that serves plain rows may fail in any way on masked ones
            raise NoTimes("failed", f"in the gate: {type(error).__name__}: {first_line(error)}") from None

    def _keep(self, record: Record) -> None:
        """Into the file, instead of what was known of this recipe; but a screening that passes undoes no verdict."""
        passes_only_screen = record.notes["stage"] == "screen" and record.notes["outcome"] == "pass"

        def is_replaced(known: Record) -> bool:
            same = known.recipe == record.recipe and known in self._known()
            return same and not (passes_only_screen and known.notes["stage"] == "stress" and bool(known.call_ms))

        self.evidence.put(record, is_replaced)
        self.kept[record.recipe] = record


def _told(report: Report, stage: str) -> dict[str, Any]:
    """What the gate said, without what the record says itself; of a screening, no list of trials."""
    left_out = {"case", "recipe", "machine"} | ({"groups", "conditions"} if stage == "screen" else set())
    return {key: value for key, value in report.as_dict().items() if key not in left_out}


def _facts_of(measured: Measured, earlier: Record | None) -> dict[str, Any]:
    """A record's fields; the first result's seconds stay those of the earlier record, whose caches were empty."""
    return {
        "call_ms": measured.times.as_dict(),
        "beside_ms": {name: times.as_dict() for name, times in measured.beside.items()},
        "first_result_s": earlier.first_result_s if earlier else measured.first_result_s,
        "device_peak_bytes": measured.peak_bytes,
    }
