"""A grade is of our class, by the official rule, and leaves nothing running; else it is none, and says so."""

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import STAND_IN


def test_a_script_that_keeps_its_own_class_is_no_grade_of_ours(grade: Any, tmp_path: Path) -> None:
    script, said = tmp_path / "captured.py", STAND_IN.read_text()
    script.write_text(
        said.replace("def main() -> int:", "def main(mine=UserOptimizedTransformer) -> int:").replace(
            "UserOptimizedTransformer(config)", "mine(config)"
        )
    )
    result, (record,) = grade(script=script)
    assert result.exit_code == 1 and not record.passed and record.recipe == "none"
    assert record.notes["reason"].startswith("the drop-in never ran") and "never ran" in result.stderr
    assert record.verdicts["script"]["said"] == "PASS", "the script's own word is kept"


def test_a_class_that_counts_nothing_is_counted_once_and_one_that_is_not_called_fails(
    grade: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        f"import sys\nsys.path.insert(0, {str(STAND_IN.parent)!r})\n"
        "from stand_in import BaselineTransformer, copy_model_weights\n"
        "class UserOptimizedTransformer(BaselineTransformer): pass\n"
    )
    result, (record,) = grade("--drop-in", str(other))
    assert result.exit_code == 0 and record.notes["runs"] == {"counted by its first call": 1}
    script = tmp_path / "uncalled.py"
    script.write_text(STAND_IN.read_text().replace("judge(name, optimized(", "judge(name, baseline(").replace(
        '("optimized", optimized)', '("optimized", baseline)'))  # fmt: skip
    result, (record,) = grade("--drop-in", str(other), script=script)
    assert result.exit_code == 1 and record.notes["reason"].startswith("the drop-in never ran")


@pytest.mark.parametrize("says", [True, False])
def test_a_script_with_a_looser_rule_of_its_own_is_believed_where_it_says_so(
    grade: Any, tmp_path: Path, says: bool
) -> None:
    script, said = tmp_path / "looser.py", STAND_IN.read_text().replace('"atol": 0.002', '"atol": 0.5')
    script.write_text(said if says else said.replace("criterion:", "judged by:"))
    _, (record,) = grade("--", "--accuracy-trials", "1", script=script)
    told = record.verdicts["script"]
    looser = ("pass by a looser rule", "atol 0.5, rtol 0.02, NOT the official rule")
    assert (told["verdict"], told["rule"]) == (looser if says else ("pass", "official"))


@pytest.mark.parametrize(
    ("options", "verdict", "rule"),
    [
        (["--atol", "100"], "pass by a looser rule", "atol 100, rtol 0.02, NOT the official rule"),
        (["--rtol=0.5"], "pass by a looser rule", "atol 0.002, rtol 0.5, NOT the official rule"),
        (["--ato", "100"], "pass by a looser rule", "atol 100, rtol 0.02, NOT the official rule"),
        (["--atol", "1e-3"], "pass", "atol 0.001, rtol 0.02, NOT the official rule"),
        (["--atol", "100", "--atol", "0.002"], "pass", "official"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_another_rule_passes_is_no_pass_of_the_official_one(
    grade: Any, options: list[str], verdict: str, rule: str
) -> None:
    result, (record,) = grade("--", *options, "--accuracy-trials", "1")
    told = record.verdicts["script"]
    assert (told["verdict"], told["rule"], told["said"]) == (verdict, rule, "PASS")
    assert record.passed == (verdict == "pass") == (result.exit_code == 0) == (record.notes["reason"] is None)
    assert (f"{verdict} ({rule})" if rule != "official" else "pass, largest") in result.stderr


def test_a_case_that_runs_too_long_takes_what_it_started_along(grade: Any, tmp_path: Path) -> None:
    """A child in a session of its own, which holds the script's output open: it once kept the grader waiting."""
    script, number = tmp_path / "starts.py", tmp_path / "pid"
    script.write_text(
        "import subprocess, time\nclass UserOptimizedTransformer: pass\ndef copy_model_weights(*given): pass\n"
        "def main():\n"
        "    child = subprocess.Popen(['sleep', '90'], start_new_session=True)\n"
        f"    open({str(number)!r}, 'w').write(str(child.pid))\n"
        "    time.sleep(90)\n"
    )
    began = time.monotonic()
    result, (record,) = grade("--timeout", "6", script=script)
    assert time.monotonic() - began < 30 and result.exit_code == 1
    assert "it ran past 6 s and was ended" in record.notes["reason"] and record.notes["exit_code"] is None
    left = Path("/proc") / number.read_text() / "stat"
    assert not left.exists() or left.read_text().split()[2] == "Z", "the child is alive"


@pytest.mark.parametrize("where", ["nowhere/records.jsonl", "."])
def test_a_place_for_records_that_is_none_is_refused_before_anything_runs(
    grade: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("frontier.grading.Grader.records", lambda *given: pytest.fail("it ran"))
    result, _ = grade("--output", str(tmp_path / where))
    assert result.exit_code == 2 and "no records can be put in" in result.stderr
