"""The script's own verdict counts: wrong, broken and dead runs are graded failing, each with its reason."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import STAND_IN, TINY

from frontier.case import Case
from frontier.errors import CaseError
from frontier.grading import cases_of, parse, why_not_passed
from frontier.record import Record

RELEASE = Path(__file__).resolve().parents[2] / "scripts" / "release.py"

OURS = "from frontier.adaptors.organizer import UserOptimizedTransformer as Ours, copy_model_weights\n"
WRONG = {
    "wrong numbers": ("def forward(self, x, m=None): return super().forward(x, m) + 0.01", "elements fail"),
    "one wrong element": (
        "def forward(self, x, m=None):\n  y = super().forward(x, m)\n  y[-1, -1, -1] += 1\n  return y",
        "5 of 5120 elements fail",  # one in each of five trials
    ),
    "NaN": ("def forward(self, x, m=None): return super().forward(x, m) * float('nan')", "5120 of 5120 elements fail"),
    "an error": ("def forward(self, x, m=None): raise ValueError('planted')", "exit code 1: ValueError: planted"),
    "a dead process": ("def forward(self, x, m=None): import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "an early end": ("def forward(self, x, m=None): raise SystemExit(0)", "exit code 0: "),
    "the exit code of timeout": ("def forward(self, x, m=None): import os; os._exit(124)", "exit code 124"),
    "a signal without a name": ("def forward(self, x, m=None): import os; os.kill(os.getpid(), 40)", "by signal 40"),
    "bytes that are no text": (
        "def forward(self, x, m=None): import os; os.write(1, b'\\xff\\xfe'); os._exit(3)",
        "exit code 3: \ufffd\ufffd",
    ),
    "no end": ("def forward(self, x, m=None): import time; time.sleep(99)", "it ran past 9 s and was ended"),
}


@pytest.mark.parametrize(
    "options",
    [
        ["--padding-ratio", "0.4"],
        ["--input-scale", "100", "--no-allow-tf32", "--seed", "-1"],
        ["--compile-baseline", "--padding-ratio", "0.2"],
        ["--dtype", "bfloat16"],
        ["--dtype", "float16", "--non-strict-weight-copy"],
        ["--compile-user", "--compile-mode", "max-autotune"],
    ],
    ids=" ".join,
)
def test_the_drop_in_passes_whatever_options_the_script_is_given(grade: Any, options: list[str]) -> None:
    before = STAND_IN.read_bytes()
    result, (record,) = grade("--", *options)
    assert result.exit_code == 0, result.stderr
    assert record.passed and record.kind == "grade" and record.case["name"] == "tiny" and record.refused is None
    verdict, notes = record.verdicts["script"], record.notes
    assert verdict["elements"] == 5 * 2 * 16 * 32 and verdict["failing"] == 0 and len(notes["trials"]) == 5
    assert notes["speedup"] > 0 and notes["optimized_ms"]["p50"] > 0 and notes["exit_code"] == 0
    assert record.recipe == ("plain: rows are not a float32 tensor" if "--dtype" in options else "fp32/packed/flash")
    assert set(notes["runs"]) == {record.recipe}
    assert record.case["input_scale"] == (100 if "--input-scale" in options else 1)
    assert record.case["seed"] == (-1 if "--seed" in options else 1234)
    assert STAND_IN.read_bytes() == before


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_is_graded_failing_and_keeps_its_record(grade: Any, tmp_path: Path, fault: str) -> None:
    body, reason = WRONG[fault]
    planted = tmp_path / "planted.py"
    lines = "\n".join(f"  {line}" for line in body.splitlines())
    planted.write_text(f"{OURS}class UserOptimizedTransformer(Ours):\n{lines}\n")
    result, (record,) = grade("--drop-in", str(planted), *(["--timeout", "9"] if fault == "no end" else []))
    assert result.exit_code == 1 and not record.passed
    assert reason in record.notes["reason"] and reason in result.stderr
    assert (record.refused is None) == ("elements" in reason)


def test_a_script_that_runs_another_case_fails(grade: Any) -> None:
    result, (record,) = grade("--", "--seq-len", "8")
    assert result.exit_code == 1
    assert record.notes["reason"] == "the script ran another case: seq_len=8, not 16"


def test_a_script_without_the_names_fails(grade: Any, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text("def main(): print('summary: PASS')\n")
    result, (record,) = grade(script=script)
    assert result.exit_code == 1 and "other.py has no `UserOptimizedTransformer` to replace" in record.notes["reason"]


def test_one_failing_case_stops_no_other(grade: Any, tmp_path: Path, tiny: Path) -> None:
    odd = tmp_path / "odd.toml"
    odd.write_text(TINY.replace("tiny", "odd").replace("seq_len = 16", "seq_len = 17"))
    planted = tmp_path / "planted.py"
    planted.write_text(
        f"{OURS}class UserOptimizedTransformer(Ours):\n"
        "  def forward(self, x, m=None): return super().forward(x, m) + (x.shape[1] == 17)\n"
    )
    output = tmp_path / "records.jsonl"
    arguments = ("--cases", f"{odd},{tiny}", "--drop-in", str(planted), "--output", str(output))
    result, on_stdout = grade(*arguments)
    records = [Record.from_json(line) for line in output.read_text().splitlines()]
    assert result.exit_code == 1 and on_stdout == []
    assert [(record.case["name"], record.passed) for record in records] == [("odd", False), ("tiny", True)]


@pytest.mark.parametrize("option", ["--script", "--drop-in"])
def test_a_file_that_is_missing_is_refused_before_anything_runs(grade: Any, option: str) -> None:
    result, _ = grade(option, "nowhere.py")
    assert result.exit_code == 2 and f"no file `nowhere.py`\nhint: give {option}" in result.stderr


@pytest.mark.parametrize("option", ["--script", "--drop-in"])
def test_a_file_that_is_no_python_is_bad_input_and_no_failed_grade(grade: Any, tmp_path: Path, option: str) -> None:
    text = tmp_path / "README.md"
    text.write_text("# no script")
    result, records = grade(option, str(text))
    assert result.exit_code == 2 and "README.md` is no Python file" in result.stderr and records == []


@pytest.mark.parametrize("seconds", ["-5", "0", "nan"])
def test_a_case_is_given_some_time(grade: Any, seconds: str) -> None:
    result, records = grade("--timeout", seconds)
    assert result.exit_code == 2 and "give --timeout some seconds" in result.stderr and records == []


def test_cases_are_named_by_ranges_lists_and_files(tiny: Path) -> None:
    assert [case.name for case in cases_of(f"2-4,13,{tiny}")] == ["2", "3", "4", "13", "tiny"]
    assert len(cases_of("1-13")) == 13
    for text in ("4-2", "12-15", "x", "", "1-300000000", f"1-{9:0>5000}", "²-3", "1-٣", "01-03"):
        with pytest.raises(CaseError):
            cases_of(text)


SAID = """=== Configuration ===
TransformerConfig(batch_size=2, seq_len=16, d_model=32, num_heads=4, ffn_dim=32, num_layers=2, causal=True)
device=cuda, dtype=torch.float32, torch=2.11.0
gpu=NVIDIA H200

=== Accuracy check ===
trial 01/1: PASS | max_abs=0.00151 | max_rel=inf | failed=0/1024
summary: PASS | max_abs=0.00151 | max_rel=inf | failed=0/1024

=== Performance benchmark ===
baseline : median=0.6123 ms | mean=0.6200 ms | p90=0.6500 ms | min=0.6000 ms | throughput=13225.54 token/s
optimized: median=0.0312 ms | mean=0.0320 ms | p90=0.0340 ms | min=0.0300 ms | throughput=262564.10 token/s
speedup  : 19.625x based on median latency
"""


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (("", ""), 0, None),
        (("", ""), 2, "exit code 2: speedup"),
        (("summary: PASS", "summary: FAIL"), 0, "0 of 1024 elements fail"),
        (("summary", "sumary"), 0, "exit code 0"),
        (("failed=0/1024\n\n", "failed=0/0\n\n"), 0, "the script compared nothing"),
        (("speedup ", "speedap "), 0, "no times or no speedup"),
        (("baseline :", "baselene :"), 0, "no times or no speedup"),
        (
            ("| max_abs=0.00151 | max_rel=inf | failed=0/1024\n\n", "| max_abs=nan | max_rel=inf | failed=0/1024\n\n"),
            0,
            "largest error is no number",
        ),
        (("num_layers=2, ", "num_layers=3, "), 0, "ran another case: num_layers=3, not 2"),
        (("causal=True", "causal=False"), 0, "ran another case: causal=False, not True"),
        (("TransformerConfig", "Other"), 0, "ran another case: batch_size=None, not 2"),
    ],
)
def test_what_the_script_says_is_believed_only_whole(
    tiny: Path, change: tuple[str, str], code: int, reason: str | None
) -> None:
    said = SAID.replace(*change)
    got = why_not_passed(Case.load(tiny), parse(said), code, said, "")
    assert got is None if reason is None else got and reason in got


def test_the_scripts_numbers_are_read() -> None:
    found = parse(SAID)
    assert found["speedup"] == 19.625 and found["optimized_ms"] == {
        "p50": 0.0312,
        "mean": 0.032,
        "p90": 0.034,
        "least": 0.03,
    }
    assert found["summary"]["largest_error"] == 0.00151 and found["summary"]["largest_relative_error"] is None


def release(
    tmp_path: Path, tiny: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    output = tmp_path / "release.jsonl"
    command = [sys.executable, str(RELEASE), "--script", str(STAND_IN), "--cases", str(tiny), "--output", str(output)]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    return done, [json.loads(line) for line in output.read_text().splitlines()] if output.is_file() else []


def test_a_release_keeps_every_run_of_every_series(tmp_path: Path, tiny: Path) -> None:
    done, records = release(tmp_path, tiny, "--series", "2", "--", "--accuracy-trials", "1")
    assert done.returncode == 0, done.stderr
    assert [record["notes"]["series"] for record in records] == [1, 2]
    assert "| tiny | fp32/packed/flash | 2 of 2 |" in done.stdout
    assert "Geometric mean of the median speedups of 1 cases" in done.stdout and "Failed" not in done.stdout


def test_a_failed_run_stays_in_the_release(tmp_path: Path, tiny: Path) -> None:
    planted = tmp_path / "planted.py"
    body, _ = WRONG["wrong numbers"]
    planted.write_text(f"{OURS}class UserOptimizedTransformer(Ours):\n  {body}\n")
    done, records = release(tmp_path, tiny, "--series", "1", "--drop-in", str(planted))
    assert done.returncode == 1 and len(records) == 1
    assert "| tiny | | 0 of 1 |" in done.stdout and "* case tiny, series 1: " in done.stdout


def test_a_release_that_is_stopped_keeps_what_ended_and_leaves_nobody_computing(tmp_path: Path, tiny: Path) -> None:
    output, endless = tmp_path / "release.jsonl", tmp_path / "endless.py"
    endless.write_text(
        f"{OURS}import os, pathlib, time\nclass UserOptimizedTransformer(Ours):\n"
        "  def __init__(self, config):\n    super().__init__(config)\n    first = pathlib.Path('first')\n"
        "    if first.exists(): pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(99)\n    first.touch()\n"
    )
    command = [sys.executable, str(RELEASE), "--script", str(STAND_IN), "--cases", f"{tiny},{tiny}"]
    command += ["--output", str(output), "--series", "1", "--drop-in", str(endless)]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as run:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert run.poll() is None
            time.sleep(0.05)
        run.terminate()
        _, talk = run.communicate(timeout=60)
    assert run.returncode == 130 and talk.endswith(f"stopped by request: 1 records of this run are in {output}\n")
    assert len(output.read_text().splitlines()) == 1
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_release_looks_at_its_output_before_it_runs(tmp_path: Path, tiny: Path) -> None:
    done, _ = release(tmp_path, tiny, "--output", str(tmp_path / "missing" / "release.jsonl"))
    assert done.returncode == 2 and "names a file in a folder that exists" in done.stderr
    assert "series 1" not in done.stderr
