"""The tables of in-core calls say what the records say: choice, ceilings, means, MFU by hand, and why others lost."""

import dataclasses
import math
from typing import Any

import pytest

from frontier.case import Case
from frontier.record import Record
from frontier.report import calls, grades
from frontier.report.markdown import results_text
from frontier.report.tables import table

BASE, YARD = "baseline", "compiled fp16 layers"
FACTS: dict[str, Any] = {
    "machine": "NVIDIA H200", "command": "frontier tune", "commit": None, "source_sha256": "0" * 16,
    "versions": {"torch": "2.11", "driver": "580"}, "started": "2026-01-01T00:00:00",
}  # fmt: skip
RATES = {"gemm_tflops": 800.0, "copy_gbps": 4000.0, "float32_peak_tflops": 66.9}


def tuned(name: str, recipe: str, ms: float = 0.05, **facts: Any) -> Record:
    case = Case.load(name)
    notes = {"stage": "stress", "outcome": "pass", "promotable": True, "noise": 0.02, "trials": 50, **RATES}
    notes |= facts.pop("notes", {})
    gate = {"verdict": notes["outcome"], "budget": 0.41, **facts.pop("gate", {})}
    given: dict[str, Any] = {
        "kind": "tune", "case": case.as_dict(), "flops": case.flops, "recipe": recipe,
        "call_ms": {"p20": ms * 0.9, "p50": ms, "p80": ms * 1.1, "trials": 300}, "first_result_s": 2.5,
        "beside_ms": {BASE: {"p50": 2.0}, YARD: {"p50": 0.2}}, "device_peak_bytes": 1 << 29,
        "verdicts": {"gate": gate}, "notes": notes,
    }  # fmt: skip
    return Record(**{**FACTS, **given, **facts})


def lost(name: str, recipe: str, outcome: str, reason: str) -> Record:
    notes = {"outcome": outcome, "promotable": False, "stage": "screen"}
    return tuned(name, recipe, notes=notes, refused=reason, call_ms={}, beside_ms={}, verdicts={}, first_result_s=None)


def run_of_14(seconds: float) -> Record:
    case = Case.load("14")
    given: dict[str, Any] = {"kind": "run", "case": case.as_dict(), "flops": case.flops, "recipe": "fp16/packed/fa4"}
    return Record(**{**FACTS, **given, "pass_s": (seconds,), "notes": {}})


def text_of(*records: Record) -> str:
    return "\n\n".join([*calls.sections(list(records)), *grades.sections(list(records))])


def row(text: str, *cells: str) -> list[str]:
    """The cells of the one table row that has all of these."""
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    found = [cells_of for cells_of in rows if set(cells) <= set(cells_of)]
    assert len(found) == 1, (cells, found)
    return found[0]


def test_without_tuned_records_it_says_so() -> None:
    assert "No recipe of the in-core cases is recorded as tuned here yet" in text_of()
    assert "No recipe of the in-core cases" in results_text([run_of_14(2.8)])
    assert "No recipe of the in-core cases" not in results_text([tuned("1", "fp16/stack")])


def test_a_case_has_its_choice_its_runner_up_and_the_times_of_one_run() -> None:
    text = text_of(tuned("1", "fp16/stack", 0.05), tuned("1", "fp16/packed/short/graph", 0.09))
    assert row(text, "1", "`fp16/stack`")[:8] == [
        "1", "2", "0.2", "`fp16/stack`", "0.05 (0.045 to 0.055)", "40.00", "4.00", "`fp16/packed/short/graph` 0.09",
    ]  # fmt: skip


def test_the_ceilings_are_work_at_the_matmul_rate_and_bytes_at_the_copy_rate() -> None:
    record = tuned("1", "fp16/stack", 0.05)
    floors = calls.floors_ms(record)
    assert floors["compute"] == pytest.approx(Case.load("1").flops / 800e12 * 1e3)
    assert floors["bytes"] == pytest.approx(2 * 64 * 128 * 128 * 4 / 4000e9 * 1e3)
    cells = row(text_of(record), "1", "`fp16/stack`")
    assert cells[10] == f"compute, {floors['compute'] / 0.05:.1%} of it reached"
    assert calls.floors_ms(tuned("1", "fp16/stack", notes={"gemm_tflops": None, "copy_gbps": None})) == {}


def test_error_budget_trials_memory_and_first_result_stand_in_the_row() -> None:
    groups = [
        {"scale": 1.0, "stress": None, "script": {"budgets": [0.7, 0.93]}},
        {"scale": 100.0, "stress": None, "script": {"budgets": [5.0]}},
        {"scale": 1.0, "stress": "ties"},
    ]
    cells = row(text_of(tuned("1", "fp16/stack", gate={"groups": groups})), "1", "`fp16/stack`")
    assert cells[-4:] == ["0.410 / 0.930", "50", "0.50", "2.5 s"]


def test_a_first_result_seen_by_its_own_command_fills_in_where_caches_were_warm() -> None:
    choice = tuned("1", "fp16/stack", first_result_s=None)
    seen = {"kind": "first-result", "call_ms": {}, "beside_ms": {}, "verdicts": {}, "notes": {}}
    assert row(text_of(choice), "1", "`fp16/stack`")[-1] == "caches were warm"
    other, own = (tuned("1", recipe, **seen, first_result_s=9.5) for recipe in ("fp16/packed/flash", "fp16/stack"))
    assert row(text_of(choice, other), "1", "`fp16/stack`")[-1] == "caches were warm"
    assert row(text_of(choice, other, own), "1", "`fp16/stack`")[-1] == "9.5 s"


def test_the_mean_of_grades_is_of_medians_of_all_cases_at_one_commit_or_not_told() -> None:
    def graded(name: str, speedup: float, verdict: str = "pass", commit: str = "a" * 40, **told: str) -> Record:
        times = {"baseline_ms": {"p50": 2.0}, "optimized_ms": {"p50": 2.0 / speedup}}
        notes = {"speedup": speedup, "reason": None, **times, **told}
        record = tuned(name, "fp16/stack", kind="grade", verdicts={"script": {"verdict": verdict}})
        return dataclasses.replace(record, notes=notes, commit=commit)

    all_but_one = [graded(str(n), 8.0) for n in range(1, 13)]
    assert "Geometric mean of the speedups" not in text_of(*all_but_one, graded("13", 8.0, "fail"))
    assert "Geometric mean of the speedups" not in text_of(*all_but_one, graded("13", 8.0, options="--dtype float16"))
    assert "Geometric mean of the speedups" not in text_of(*all_but_one, graded("13", 8.0, drop_in="exported.py"))
    thrice = [graded("13", speedup) for speedup in (1.0, 8.0, 900.0)]
    assert "Geometric mean of the speedups at `aaaaaaaaaaaa`: **8.00 x**" in text_of(*all_but_one, *thrice)
    assert "Geometric mean of the speedups" not in text_of(*all_but_one, graded("13", 8.0, commit="b" * 40))
    text = text_of(*all_but_one, *thrice, graded("13", 9.0, "fail"))
    assert row(text, "3 of 4") == ["13", "3 of 4", "2 (2 to 2)", "0.25 (0.002222 to 2)", "8.00 (1.00 to 900.00)"]
    assert "Medians of the runs" not in text_of(*all_but_one, graded("13", 8.0))


def test_means_are_geometric_and_name_their_cases() -> None:
    text = text_of(tuned("1", "fp16/stack", 0.1), tuned("2", "fp16/stack", 0.025), tuned("12", "fp16/stack", 0.05))
    ratios = [2 / 0.1, 2 / 0.025, 2 / 0.05]
    mean = math.prod(ratios) ** (1 / 3)
    assert f"**{mean:.2f} x the baseline** over cases 1-2 and 12; **{mean / 10:.2f} x the yardstick**" in text


def test_only_what_was_timed_beside_the_compiled_layers_has_a_yardstick() -> None:
    of_old = {BASE: {"p50": 2.0}, "fp16/packed/flash/compile-max-autotune": {"p50": 0.2}}
    old, new = tuned("1", "fp16/stack", 0.1, beside_ms=of_old), tuned("12", "fp16/stack", 0.1)
    assert row(text_of(old), "1", "`fp16/stack`")[2] == "" and "x the yardstick**" not in text_of(old)
    assert "plain fp16 SDPA layers" not in text_of(old)
    text = text_of(old, new)
    assert row(text, "12", "`fp16/stack`")[2] == "0.2" and "**2.00 x the yardstick** over case 12." in text
    assert "*yardstick* is plain fp16 SDPA layers" in text


def test_utilisation_is_all_flop_over_all_seconds_by_both_denominators() -> None:
    text = text_of(tuned("6", "fp16/stack", 4.0), tuned("8", "fp16/stack", 0.8), run_of_14(2.8), run_of_14(3.0))
    flops = [Case.load(name).flops for name in ("6", "8", "14")]
    small, whole = sum(flops[:2]) / 4.8e-3 / 1e12, sum(flops) / (2.8 + 4.8e-3) / 1e12
    for rate, cases in ((small, "cases 6 and 8"), (whole, "cases 6, 8 and 14")):
        assert (
            f"- {cases}: {rate:,.1f} TFLOP/s = {rate / 66.9:.1%} of 67 TFLOP/s (the card's float32 peak), "
            f"{rate / 800:.1%} of 800 TFLOP/s (its measured half-precision matmul)" in text
        )
    assert "FLOP-weighted MFU = sum of FLOP / (rate x sum of seconds)" in text
    assert "without cases 1-5, 7 and 9-13" in text


def test_without_measured_rates_no_utilisation_is_claimed() -> None:
    assert "MFU: the card's rates were not measured here." in text_of(
        tuned("1", "fp32/packed/flash", notes=dict.fromkeys(RATES))
    )


def test_each_loser_says_why() -> None:
    worst = {
        "verdict": "fail", "row": 3, "position": 7, "channel": 1, "got": 0.5, "wanted": 0.25, "budget": 1.3,
        "trial": "scale 1, padding 0", "faults": [],
    }  # fmt: skip
    plain = {"stage": "screen", "promotable": False}
    text = text_of(
        tuned("1", "fp16/stack", 0.05),
        tuned("1", "fp16/packed/short/graph", 0.0505),
        tuned("1", "fp16/packed/flash/graph", 0.10, notes=plain),
        tuned("1", "bf16/stack", 0.04, notes={"outcome": "fail", "promotable": False}, gate={"worst": worst}),
        tuned("1", "tf32/stack", 0.03, notes={"promotable": False}, gate={"reasons": ["headroom: 0.9 spent"]}),
        tuned("1", "fp16/packed/scores/graph", 0.02, notes=plain),
        lost("1", "fp16/packed/fa4", "refused", "head width 8, needs 16"),
        lost("1", "fp32/packed/efficient", "out of memory", "out of memory: it needs 9.00 GiB"),
    ).split("### Tuned and not chosen")[1]
    why = {
        "fp16/packed/short/graph": "within the noise of the choice (+1.0%, noise 2.0%)",
        "fp16/packed/flash/graph": "slower by 100%",
        "bf16/stack": "fails the gate: 1.3 of the budget at row 3, position 7, channel 1 (0.5 for 0.25), "
        "scale 1, padding 0",
        "tf32/stack": "passes its trials, not promoted: headroom: 0.9 spent",
        "fp16/packed/scores/graph": "passes its trials, not promoted: not through the whole stress program",
        "fp16/packed/fa4": "head width 8, needs 16",
        "fp32/packed/efficient": "out of memory: it needs 9.00 GiB",
    }
    for recipe, reason in why.items():
        assert row(text, f"`{recipe}`")[-1] == reason
    assert row(text, "`fp16/packed/flash/graph`")[:4] == ["1", "`fp16/packed/flash/graph`", "0.1", "2.00"]
    assert row(text, "`bf16/stack`")[3] == "0.80" and row(text, "`fp16/packed/fa4`")[2:5] == ["", "", ""]
    assert "`fp16/stack`" not in text, "the choice is no loser"


def test_a_case_that_nothing_passed_says_so() -> None:
    failed = tuned("7", "fp16/stack", notes={"outcome": "fail", "promotable": False})
    text = text_of(failed)
    assert "none passed the whole stress program" in text and "No shipped case has a choice yet." in text


def test_cases_come_by_number_and_a_users_own_last() -> None:
    mine = tuned("1", "fp16/stack")
    mine = Record(**{n: getattr(mine, n) for n in Record.__slots__} | {"case": mine.case | {"name": "a", "heads": 8}})
    text = text_of(mine, tuned("10", "fp16/stack"), tuned("2", "fp16/stack")).split("### Tuned")[0]
    assert [line.split(" | ")[0] for line in text.splitlines() if "`fp16/stack`" in line] == ["| 2", "| 10", "| a"]
    assert "over cases 2 and 10" in text


def test_tuned_and_graded_records_stay_out_of_the_tables_of_runs() -> None:
    refused = lost("1", "fp16/packed/fa4", "refused", "no")
    assert "### Refused, failed and superseded" not in results_text([tuned("1", "fp16/stack"), refused])
    assert "### Refused, failed and superseded" in results_text(
        [Record(**{n: getattr(refused, n) for n in Record.__slots__} | {"kind": "run"})]
    )


def test_grades_have_a_table_with_their_reasons() -> None:
    facts = {"kind": "grade", "call_ms": {}, "verdicts": {"script": {"verdict": "fail"}}}
    graded = tuned("1", "fp16/stack", **facts)
    notes = {
        "speedup": 20.5,
        "baseline_ms": {"p50": 2.05},
        "optimized_ms": {"p50": 0.1},
        "reason": "3 of 9 elements fail",
    }
    graded = Record(**{n: getattr(graded, n) for n in Record.__slots__} | {"notes": notes})
    assert row(text_of(graded).split("### Graded")[1], "fail") == [
        "1", "fail", "2.0500", "0.1000", "20.50", "`fp16/stack`", "`unknown`", "frontier", "", "3 of 9 elements fail",
    ]  # fmt: skip


def test_a_cell_may_hold_a_bar_or_a_line_end() -> None:
    assert table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"
