"""RESULTS.md on rows in chunks: shares of the kernel alone, and kinds of records that no table knows."""

from typing import Any

from frontier.case import Case
from frontier.record import Record
from frontier.report import long_rows

FACTS: dict[str, Any] = {
    "machine": "NVIDIA H200", "command": "frontier run", "commit": None, "source_sha256": "0" * 16, "versions": {},
    "started": "2026-01-01T00:00:00", "recipe": "fp16/packed/fa4",
}  # fmt: skip
GIB = 1 << 30


def run_of(seconds: float, budget: str | None = None, **facts: Any) -> Record:
    case = Case.load("14").override(batch_size=1, seq_len=1 << 20)
    given: dict[str, Any] = {
        "kind": "run", "case": case.as_dict(), "flops": case.flops, "pass_s": (seconds,), "output": "file",
        "plan": {"flow": "chunked", "chunk": 65_536, "spool": "host"}, "busy_s": {"compute": 0.95 * seconds},
        "device_planned_bytes": 4 * GIB, "device_peak_bytes": 3 * GIB,
        "notes": {"name": "a row"} | ({"device_budget": budget} if budget else {}),
    }  # fmt: skip
    return Record(**{**FACTS, **given, **facts})


def kernel(tflops: float, seq_len: int = 1 << 20, **facts: Any) -> Record:
    case = Case.load("14").override(batch_size=1, seq_len=seq_len, layers=1)
    notes = {"name": "FA4 alone", "attention_tflops": tflops}
    return Record(**{**FACTS, "kind": "kernel", "case": case.as_dict(), "notes": notes, **facts})


def cells(text: str, first: str, number: int = 0) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in lines[number].strip("|").split(" | ")]


def text_of(*records: Record) -> str:
    return "\n\n".join(long_rows.sections(list(records)))


def test_a_run_stands_beside_its_kernel_and_beside_no_budget() -> None:
    others = kernel(1.0, recipe="fp16/packed/cudnn"), kernel(1.0, seq_len=4096), kernel(1.0, refused="no card")
    text = text_of(*others, kernel(500.0), run_of(10.0, "4GiB"), run_of(9.0))
    found = cells(text, "a row")
    attention = 2 * Case.load("14").override(seq_len=1 << 20).attention_flops_per_row / 10.0 / 1e12
    assert found[1:5] == ["fa4", "4GiB", "65,536", "host"]
    assert found[7:9] == [f"{attention:.4g}", f"{attention / 500:.1%} of 500 (1,048,576)"]
    assert found[10:13] == ["1.111", "95.0%", "3.00, 75.0%"]
    assert cells(text, "a row", 1)[10] == "", "nothing stands beside itself"


def test_without_a_kernel_there_is_no_share() -> None:
    assert cells(text_of(run_of(10.0)), "a row")[8] == ""


def test_runs_of_whole_rows_refused_and_superseded_ones_are_not_here() -> None:
    notes = {"name": "a row", "superseded": "again"}
    assert text_of(run_of(1.0, plan={"flow": "whole"}), run_of(1.0, refused="no"), run_of(1.0, notes=notes)) == ""


def test_a_kind_that_no_table_knows_is_shown_as_it_is_and_a_failure_says_why() -> None:
    odd = kernel(1.0, kind="something new", notes={"name": "odd", "deep": {"down": [1, 2.5]}, "series": "x"})
    lost = kernel(1.0, kind="chunk-error", notes={"name": "curve"}, refused="exit 2: no | card")
    text = text_of(odd, lost, kernel(1.0, kind="disk", notes={}))
    assert cells(text, "odd")[3] == "deep: {down: [1, 2.5]}"
    assert "no \\| card" in text and "### Error against" not in text
