"""The series of long rows at toy size: each kind of step leaves its record; one that fails stops no other."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from frontier.record import Record
from frontier.report.markdown import results_text

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))  # as for a script that is started by its name
    try:
        return script_of("long_rows")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(autouse=True)
def own_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))  # whoever times on this machine meanwhile is no concern of these runs


def do(script: ModuleType, *only: str, seconds: int = 300) -> tuple[int, dict[str, Record]]:
    """The exit code and the records by name; the whole series where nothing is named."""
    words = ["--output", "toy.jsonl", "--toy", "--fast-folder", "fast", "--disk-folder", "disk", "--commit", "toy"]
    for folder in ("fast", "disk"):
        Path(folder).mkdir(exist_ok=True)
    code = script.main([*words, "--seconds", str(seconds), *(["--only", ";".join(only)] if only else [])])
    path = Path("toy.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return code, {record.notes["name"]: record for record in map(Record.from_json, lines)}


def test_each_kind_of_step_leaves_its_record_and_the_report_shows_it(script: ModuleType) -> None:
    run, judged, on_disk = "2,048 positions, 4 GiB card", "1,024 positions", "2,048 positions, from and to the disk"
    only = ("disk", "cuDNN alone", run, judged, f"judged {judged}", "error by chunks", on_disk, "journal")
    code, records = do(script, *only)
    assert code == 0 and set(records) == {*only} - {f"judged {judged}"}
    assert {r.commit for r in records.values()} == {"toy"}
    assert records["cuDNN alone"].notes["attention_tflops"] > 0
    assert records["disk"].notes["gbps"]["write and sync"] > 0
    assert records[run].plan["flow"] == "chunked" and records[run].output == "file"
    assert records[run].notes["device_budget"] == "4GiB" and records[on_disk].notes["place"] == "disk"
    told = records[judged].verdicts["referee"]
    assert (told["verdict"], told["device"], told["positions"]["judged"]) == ("pass", "cpu", 1024)
    assert {"pass_share", "run_share"} < set(records["journal"].notes)
    assert not list(Path("fast").iterdir()) and not list(Path("disk").glob("long_*"))
    text = results_text(list(records.values()))
    for head in ("### Rows in chunks", "### Error against the number of chunks", "### Measured beside the runs"):
        assert head in text


def test_the_longest_row_keeps_a_trace_that_its_command_does_not_place(script: ModuleType) -> None:
    code, records = do(script, "4,096 positions")
    assert code == 0 and json.loads(Path("toy.trace.json").read_text())["traceEvents"]
    assert "--trace toy.trace.json" in records["4,096 positions"].command
    assert records["4,096 positions"].busy_s["compute"] > 0


def test_a_step_that_fails_is_told_and_the_others_go_on(script: ModuleType) -> None:
    lost, none = "2,048 positions", "judged 1,024 positions"  # no input was made; no such run was
    code, records = do(script, lost, "case 14, on the fly", none)
    assert code == 1 and set(records) == {lost, "case 14, on the fly", none}
    assert "exit 2" in str(records[lost].refused) and "long_x.npy" in str(records[lost].refused)
    assert "no run" in str(records[none].refused) and records["case 14, on the fly"].pass_s
    text = results_text(list(records.values()))
    assert "no run '1,024 positions' to be judged" in text and "### Refused, failed" in text


def test_what_would_not_end_in_time_is_left_out(script: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    code, records = do(script, "case 14, on the fly", "2,048 positions", seconds=10)
    assert (code, records) == (0, {})
    assert "LEFT OUT case 14, on the fly" in capfd.readouterr().err


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(script: ModuleType) -> None:
    options = script.argparse.Namespace(output=Path("x.jsonl"), seconds=1, disk_folder="disk", commit=None)
    series = script.Series(options, script.TOY)
    with pytest.raises(script.Failed, match="time was up"):
        series.call(["sh", "-c", "sleep 60 & wait"])
