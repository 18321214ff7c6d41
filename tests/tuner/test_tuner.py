"""Every outcome is one record, nothing is done twice, and only what passed the whole stress program may be promoted."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier import tuned, tuner
from frontier.bench import Measured, NoTimes
from frontier.case import Case
from frontier.errors import InUse, Unsupported
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.record import EvidenceFile, Record, read_records
from frontier.timelock import timing_window
from frontier.timing import Times
from frontier.tuner import SCREEN, STRESS, Choices, tune

CPU = Machine.detect("cpu")
CASE = Case(name="tiny", batch_size=2, seq_len=24, d_model=16, heads=2, ffn_dim=16, layers=1)
DENSE, PACKED, FLASH, FAST = (parse_recipe(text, REFERENCE) for text in ("fp32", "packed", "flash", "packed/flash"))
MS = {DENSE: 8.0, PACKED: 4.0, FLASH: 2.0, FAST: 1.0}


@dataclasses.dataclass
class Report:
    passes: bool = True
    promotable: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {"budget": 0.25, "worst": {"row": 3}}


class Judge:
    """A gate that says of each recipe what a test wants, and remembers what it was asked."""

    def __init__(self, **verdicts: Report) -> None:
        self.verdicts, self.asked = verdicts, []

    def __call__(self, case: Case, machine: Machine, recipe: Recipe, **asked: Any) -> Report:
        stage = "screen" if asked == SCREEN else "stress"
        self.asked.append((stage, recipe))
        return self.verdicts.get(f"{stage}_{str(recipe).replace('/', '_')}", Report())


class FakeBench:
    """Times as planted; what is no number is raised."""

    noise = 0.02
    usable = True
    ms: dict[Recipe, Any] = MS

    def __init__(self, case: Case, machine: Machine, rounds: int, warm: bool) -> None:
        self.beside: list[Recipe] = []

    def __enter__(self) -> "FakeBench":
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def keep(self, recipe: Recipe) -> None:
        self.beside.append(recipe)

    def caches_of(self, recipe: Recipe) -> Any:
        return contextlib.nullcontext()

    def is_usable(self) -> bool:
        return self.usable

    def measure(self, recipe: Recipe) -> Measured:
        ms = self.ms[recipe]
        if isinstance(ms, NoTimes):
            raise ms
        beside = {str(r): Times(((self.ms[r],),)) for r in self.beside if r != recipe}
        beside["baseline"] = Times(((9.0,),))
        return Measured(times=Times(((ms,),)), beside=beside, first_result_s=3.0, peak_bytes=77)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    monkeypatch.setattr(FakeBench, "ms", dict(MS))
    monkeypatch.setattr(FakeBench, "usable", True)
    monkeypatch.setattr(tuner, "Bench", FakeBench)
    return FakeBench


@pytest.fixture
def evidence(tmp_path: Path) -> EvidenceFile:
    return EvidenceFile(tmp_path / "evidence" / "mine.jsonl")


def choices(**changes: Any) -> Choices:
    given: dict[str, Any] = {"stress": STRESS | {"trials": 2, "seeds": 1}, "rounds": 2, "recipes": tuple(MS)}
    return Choices(**{**given, **changes})


def stages(records: list[Record]) -> list[tuple[str, str, str]]:
    return [(r.notes["stage"], r.recipe, r.notes["outcome"]) for r in records]


def test_all_are_screened_then_the_fastest_go_through_the_whole_stress_program(bench, evidence) -> None:
    judge = Judge()
    records = list(tune([CASE], CPU, evidence, judge, choices()))
    assert [r[1] for r in stages(records)] == [str(r) for r in (*MS, FAST, FLASH)]
    assert judge.asked == [*(("screen", recipe) for recipe in MS), ("stress", FAST), ("stress", FLASH)]
    assert [r.recipe for r in evidence.records if r.notes["promotable"]] == [str(FAST), str(FLASH)]
    assert list(read_records(evidence.path.parent)) == evidence.records and len(evidence.records) == len(MS)


def test_a_record_holds_the_times_of_all_that_ran_beside_it(bench, evidence) -> None:
    last = list(tune([CASE], CPU, evidence, Judge(), choices(commit="abc")))[-1]
    assert last.kind == "tune" and last.recipe == str(FLASH) and last.commit == "abc"
    assert last.call_ms["p50"] == 2.0 and last.beside_ms["baseline"]["p50"] == 9.0
    assert last.beside_ms[str(FAST)]["p50"] == 1.0, "the incumbent runs beside a finalist"
    assert (last.first_result_s, last.device_peak_bytes, last.notes["noise"]) == (3.0, 77, 0.02)
    assert last.verdicts["gate"] == {"budget": 0.25, "worst": {"row": 3}, "verdict": "pass"}


@pytest.mark.parametrize("stage", ["screen", "stress"])
def test_a_recipe_that_fails_the_gate_keeps_its_times_and_is_never_promoted(bench, evidence, stage: str) -> None:
    judge = Judge(**{f"{stage}_fp32_packed_flash": Report(passes=False, promotable=True)})
    list(tune([CASE], CPU, evidence, judge, choices()))
    failed = next(r for r in evidence.records if r.recipe == str(FAST))
    assert failed.notes["outcome"] == "fail" and failed.verdicts["gate"]["worst"] == {"row": 3} and failed.call_ms
    ranked = [r.recipe for r in tuned.ranking(evidence.records)]
    assert ranked == [str(FLASH), str(PACKED)], "two others passed the whole program in its stead"


def test_a_recipe_that_passes_every_trial_but_is_not_promotable_is_not_promoted(bench, evidence) -> None:
    judge = Judge(stress_fp32_packed_flash=Report(promotable=False))
    list(tune([CASE], CPU, evidence, judge, choices()))
    assert [r.recipe for r in tuned.ranking(evidence.records)] == [str(FLASH), str(PACKED)]


@pytest.mark.parametrize("outcome", ["refused", "out of memory", "failed"])
def test_what_gives_no_times_is_a_record_with_its_reason(bench, evidence, outcome: str) -> None:
    bench.ms[FAST] = NoTimes(outcome, "for want of a nail")
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    lost = next(r for r in evidence.records if r.recipe == str(FAST))
    assert lost.notes["outcome"] == outcome and lost.refused.endswith("for want of a nail") and not lost.call_ms
    assert lost.recipe not in [r.recipe for r in tuned.ranking(evidence.records)]


def test_memory_that_runs_out_in_the_gate_is_an_outcome_too(bench, evidence) -> None:
    class Hungry(Judge):
        def __call__(self, case: Case, machine: Machine, recipe: Recipe, **asked: Any) -> Report:
            if recipe == FAST:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().__call__(case, machine, recipe, **asked)

    list(tune([CASE], CPU, evidence, Hungry(), choices()))
    lost = next(r for r in evidence.records if r.recipe == str(FAST))
    assert lost.notes["outcome"] == "out of memory" and "Tried to allocate 9 GiB" in lost.refused


def test_a_kernel_that_breaks_in_the_gate_is_an_outcome_too(bench, evidence) -> None:
    class Breaking(Judge):
        def __call__(self, case: Case, machine: Machine, recipe: Recipe, **asked: Any) -> Report:
            if recipe == FAST:
                raise TypeError("no mask for me\nmore")
            return super().__call__(case, machine, recipe, **asked)

    list(tune([CASE], CPU, evidence, Breaking(), choices()))
    lost = next(r for r in evidence.records if r.recipe == str(FAST))
    assert (lost.notes["outcome"], lost.refused) == ("failed", "failed: in the gate: TypeError: no mask for me")
    assert lost.call_ms and lost.recipe not in [r.recipe for r in tuned.ranking(evidence.records)]


def test_what_is_recorded_for_this_source_is_not_done_again_unless_asked(bench, evidence) -> None:
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    judge = Judge()
    assert list(tune([CASE], CPU, EvidenceFile(evidence.path), judge, choices())) == [] and judge.asked == []
    list(tune([CASE], CPU, EvidenceFile(evidence.path), judge, choices(again=True)))
    assert len(judge.asked) == len(MS) + 2


def test_what_passed_by_fewer_trials_is_done_again(bench, evidence) -> None:
    """Nor do such passes count as rivals: both finalists go through the larger program."""
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    more = choices(stress=STRESS | {"trials": 3, "seeds": 1})
    again = list(tune([CASE], CPU, EvidenceFile(evidence.path), Judge(), more))
    assert [r.recipe for r in again if r.notes["stage"] == "stress"] == [str(FAST), str(FLASH)]
    assert list(tune([CASE], CPU, EvidenceFile(evidence.path), Judge(), more)) == []


@pytest.mark.parametrize("change", ["case", "source"])
def test_another_case_or_another_source_is_tried_anew(bench, evidence, monkeypatch, change: str) -> None:
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    case = CASE.override(batch_size=3) if change == "case" else CASE
    if change == "source":
        monkeypatch.setattr("frontier.runner.source_sha256", lambda: "another")
    judge = Judge()
    list(tune([case], CPU, evidence, judge, choices()))
    assert len(judge.asked) == len(MS) + 2
    assert len(evidence.records) == len(MS) * (2 if change == "case" else 1)


def test_a_run_that_is_cut_short_goes_on_where_it_was(bench, evidence) -> None:
    cut: Iterator[Record] = tune([CASE], CPU, evidence, Judge(), choices())
    assert [next(cut).recipe for _ in range(2)] == [str(DENSE), str(PACKED)]
    cut.close()  # type: ignore[attr-defined]
    judge = Judge()
    list(tune([CASE], CPU, EvidenceFile(evidence.path), judge, choices()))
    assert judge.asked == [("screen", FLASH), ("screen", FAST), ("stress", FAST), ("stress", FLASH)]


def test_a_screening_of_a_new_source_does_not_undo_a_promotion_until_the_program_says_so(
    bench, evidence, monkeypatch
) -> None:
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    monkeypatch.setattr("frontier.runner.source_sha256", lambda: "another")
    list(tune([CASE], CPU, evidence, Judge(), choices(finalists=0)))
    assert [r.recipe for r in tuned.ranking(evidence.records)] == [str(FAST), str(FLASH)]
    judge = Judge(stress_fp32_packed_flash=Report(passes=False))
    list(tune([CASE], CPU, evidence, judge, choices()))
    assert [r.recipe for r in tuned.ranking(evidence.records)] == [str(FLASH), str(PACKED)]


def test_a_device_that_answers_no_more_ends_the_run_behind_the_record(bench, evidence) -> None:
    bench.ms[PACKED], bench.usable = NoTimes("failed", "illegal memory access"), False
    with pytest.raises(Unsupported, match="answers no more after fp32/packed/dense"):
        list(tune([CASE], CPU, evidence, Judge(), choices()))
    bench.usable = True
    rest = list(tune([CASE], CPU, evidence, Judge(), choices()))
    assert [r.recipe for r in rest] == [str(FLASH), str(FAST), str(FAST), str(FLASH)]


def test_words_that_are_left_out_leave_the_table_without_their_recipes(bench, evidence, monkeypatch) -> None:
    monkeypatch.setattr(tuner, "candidates", lambda case, has_card: tuple(MS))
    list(tune([CASE], CPU, evidence, Judge(), choices(recipes=(), without=("packed",))))
    assert [r.recipe for r in evidence.records if "packed" in r.recipe] == [] != evidence.records


def test_of_a_screening_the_record_keeps_no_list_of_trials(bench, evidence, monkeypatch) -> None:
    told = {"budget": 0.1, "groups": [1], "case": {}, "recipe": "x", "machine": "y"}
    monkeypatch.setattr(Report, "as_dict", lambda self: told)
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    kept = {r.notes["stage"]: set(r.verdicts["gate"]) for r in evidence.records}
    assert kept == {"screen": {"budget", "verdict"}, "stress": {"budget", "groups", "verdict"}}


def test_nothing_is_tuned_while_somebody_times(bench, evidence) -> None:
    import threading

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with timing_window(CPU):
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        with pytest.raises(InUse):
            list(tune([CASE], CPU, evidence, Judge(), choices()))
    finally:
        done.set()
        thread.join()
    assert evidence.records == []


def test_other_records_of_the_file_stay(bench, evidence) -> None:
    list(tune([CASE], CPU, evidence, Judge(), choices()))
    other = dataclasses.replace(evidence.records[0], kind="run", notes={})
    evidence.put(other, lambda known: False)
    list(tune([CASE], CPU, evidence, Judge(), choices(again=True)))
    assert evidence.records[0] == other and len(evidence.records) == len(MS) + 1


def test_on_this_cpu_a_small_case_is_tuned_for_real(evidence) -> None:
    records = list(tune([CASE], CPU, evidence, Judge(), choices(recipes=(DENSE, FAST, parse_recipe("cudnn", FAST)))))
    by_recipe = {r.recipe: r for r in records}
    assert (
        by_recipe["fp32/packed/cudnn"].notes["outcome"] == "refused"
        and "card" in by_recipe["fp32/packed/cudnn"].refused
    )
    fast = by_recipe[str(FAST)]
    assert fast.call_ms["p20"] <= fast.call_ms["p50"] <= fast.call_ms["p80"] and fast.call_ms["trials"] >= 2
    assert set(fast.beside_ms) >= {"baseline"} and fast.first_result_s > 0 and fast.notes["noise"] >= 0
