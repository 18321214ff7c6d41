"""`frontier tune` and `frontier choose` from the outside: outcomes on stdout, records in a file, the choice and why."""

import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from frontier.cli import cli
from frontier.machine import Machine
from frontier.record import read_records
from frontier.timelock import timing_window

TINY = 'name = "tiny"\nbatch_size = 1\nseq_len = 16\nd_model = 16\nheads = 2\nffn_dim = 16\nlayers = 1\n'


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("frontier.runner.source_sha256", lambda: "this very source")
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "found").mkdir()
    fixed = ["tune", "--case", "tiny.toml", "--device", "cpu", "--recipes", "fp32,packed/flash", "--recipes", "cudnn"]
    fixed += ["--rounds", "2", "--trials", "2", "--seeds", "1", "--output", "found/mine.jsonl", "--commit", "abc"]
    return lambda *more: CliRunner().invoke(cli, [*fixed, *more])


def test_each_outcome_is_a_line_and_a_record_and_the_second_time_there_is_none(tune, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = tune()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("case tiny  ")]) == len(lines) >= 3
    assert "case tiny  fp32/separate/cudnn  refused: it needs a card" in lines
    records = list(read_records(tmp_path / "found"))
    assert {r.recipe for r in records} == {"fp32/separate/dense", "fp32/packed/flash", "fp32/separate/cudnn"}
    assert all(r.kind == "tune" and r.commit == "abc" for r in records)
    # Two trials are not enough to be promoted by, and the record says so.
    reasons = [r.verdicts["gate"]["reasons"] for r in records if r.notes["stage"] == "stress"]
    assert reasons and all("trials enough to tell" in " ".join(given) for given in reasons)
    assert not any(r.notes["promotable"] for r in records)
    more = tune("--trials", "3")  # what passed by fewer is done again
    assert any("fp32/packed/flash" in line for line in more.stdout.splitlines())
    again = tune("--trials", "3")
    assert again.exit_code == 0 and again.stdout == "" and "--again does once more" in again.stderr


def test_an_outcome_as_json_is_the_record(tune, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = tune("--json", "--finalists", "0")
    assert [json.loads(line)["notes"]["stage"] for line in done.stdout.splitlines()] == ["screen"] * 3
    assert [json.loads(line)["recipe"] for line in done.stdout.splitlines()] == [
        r.recipe for r in read_records(tmp_path / "found")
    ]


def test_a_case_whose_baseline_does_not_fit_is_refused_with_the_sum(tune) -> None:  # type: ignore[no-untyped-def]
    done = tune("--device-budget", "10KiB")
    assert done.exit_code == 3 and "the dense baseline of case tiny needs" in done.stderr
    assert "the device budget is 10.00 KiB" in done.stderr and "hint:" in done.stderr


def test_a_word_that_no_recipe_has_is_no_word_to_leave_out(tune) -> None:  # type: ignore[no-untyped-def]
    done = tune("--without", "nosuchword")
    assert done.exit_code == 2 and "--without nosuchword: no recipe has such a word" in done.stderr


def test_a_recipe_that_cannot_be_read_is_refused_before_anything_is_timed(tune) -> None:  # type: ignore[no-untyped-def]
    done = tune("--recipes", "fp23")
    assert done.exit_code == 2 and "unknown word `fp23`" in done.stderr


def test_records_that_can_lie_nowhere_are_refused_and_nothing_is_made(tune, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for place, reason in ((tmp_path, "is a folder"), (tmp_path / "none" / "mine.jsonl", "no folder")):
        done = tune("--output", str(place))
        assert done.exit_code == 2 and reason in done.output
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "none").exists()


def test_no_run_starts_while_somebody_times(tune) -> None:  # type: ignore[no-untyped-def]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with timing_window(Machine.detect("cpu")):
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    run = ["run", "--case", "tiny.toml", "--device", "cpu", "--quiet"]
    try:
        refused = CliRunner().invoke(cli, run)
        assert refused.exit_code == 3 and "nothing may be computed meanwhile" in refused.stderr
    finally:
        done.set()
        thread.join()
    assert CliRunner().invoke(cli, run).exit_code == 0


def test_the_choice_of_a_card_comes_from_its_records_without_the_card() -> None:
    done = CliRunner().invoke(cli, ["choose", "--machine", "NVIDIA H200", "--case", "14", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["case"] == "14" and told["recipe"].startswith("fp16/packed/") and "NVIDIA H200" in told["why"]
    unknown = CliRunner().invoke(cli, ["choose", "--machine", "Abacus"])
    assert unknown.exit_code == 3 and "no record of `Abacus`" in unknown.stderr


def test_without_a_name_the_choice_is_for_this_machine() -> None:
    done = CliRunner().invoke(cli, ["choose", "--device", "cpu", "--case", "1", "--case", "8"])
    assert done.exit_code == 0, done.output
    assert [line.split(":")[0] for line in done.stdout.splitlines() if not line.startswith(" ")] == ["case 1", "case 8"]
