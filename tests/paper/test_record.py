"""A record survives its one JSON line; a line that is none is named by file and number."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import a_record, a_tuned, small

from frontier import record as record_module
from frontier.errors import DataError
from frontier.record import Record, read_records

times = st.lists(st.floats(0, 1e6), max_size=4).map(tuple)
plain_values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(times, times, st.text(), st.none() | st.text(), st.dictionaries(st.text(), plain_values))
def test_a_record_reads_back_from_its_line(pass_s, card_s, command, refused, notes) -> None:  # type: ignore[no-untyped-def]
    record = a_record(small(), "fp32", pass_s=pass_s, card_s=card_s, command=command, refused=refused, notes=notes)
    line = record.to_json()
    assert len(line.splitlines()) == 1
    assert Record.from_json(line) == record
    assert Record.from_json(line) != dataclasses.replace(record, command=command + "x")


def line_with(**changes: Any) -> str:
    return json.dumps({**json.loads(a_record(small(), "fp32").to_json()), **changes})


BAD_LINES = {
    "cut short": a_record(small(), "fp32").to_json()[:-1],
    "no JSON": "hello",
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "an unknown key": line_with(speed=3),
    "a missing key": line_with().replace('"kind"', '"kinds"'),
    "a number of times": line_with(pass_s=3),
    "a later schema": line_with(schema=2),
    "a tuned one without its outcome": line_with(kind="tune", notes={"stage": "screen"}),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, fault: str) -> None:
    good = a_record(small(), "fp32").to_json()
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{BAD_LINES[fault]}\n{good}\n")
    found = read_records(tmp_path)
    assert next(found) == Record.from_json(good)
    with pytest.raises(DataError, match=r"^a\.jsonl:3: not a record of schema 1") as caught:
        next(found)
    assert caught.value.hint and caught.value.exit_code == 2


DAMAGE: dict[str, tuple[str, Any]] = {
    "its case lacks sizes": ("case", {"batch_size": 0}),
    "its case lacks sizes above 0": ("case", {"seq_len": "64"}),
    "its recipe is None": ("recipe", None),
    "its machine is None": ("machine", None),
    "its case lacks a name": ("case", {"name": None}),
    "or whether it is causal": ("case", {"causal": 1}),
    "what should hold names and values does not": ("verdicts", "x"),
    "time, trials, noise and budget of its pass are [nan": ("call_ms", {"p50": math.nan}),
    "noise and budget of its pass are [1.0, 0,": ("notes", {"trials": 0}),
    "not a record of schema 1: must be real number, not NoneType": ("notes", {"noise": None}),
    "not a record of schema 1: 'p50'": ("call_ms", None),
    "not a record of schema 1: must be real number, not str": ("verdicts", {"gate": {"budget": "nan"}}),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_tuned_record_by_which_nothing_can_be_chosen_is_named(tmp_path: Path, said: str) -> None:
    key, value = DAMAGE[said]
    table = json.loads(a_tuned(small(), "fp16/packed/flash").to_json())
    table[key] = {**table[key], **value} if isinstance(value, dict) else ({} if key == "call_ms" else value)
    (tmp_path / "mine.jsonl").write_text(f"{a_tuned(small(), 'fp32').to_json()}\n{json.dumps(table)}\n")
    with pytest.raises(DataError) as found:
        list(read_records(tmp_path))
    assert str(found.value).startswith("mine.jsonl:2: ") and said in str(found.value)


def test_bytes_that_are_no_text_are_named_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"^a\.jsonl"):
        list(read_records(tmp_path))


def test_records_come_by_file_name_then_line_and_other_files_are_left_alone(tmp_path: Path) -> None:
    for name, commands in (("b.jsonl", ("3",)), ("a.jsonl", ("1", "2"))):
        lines = [a_record(small(), "fp32", command=command).to_json() for command in commands]
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "notes.txt").write_text("no record")
    assert [record.command for record in read_records(tmp_path)] == ["1", "2", "3"]
    assert list(read_records(tmp_path / "none")) == []


def test_the_evidence_that_ships_reads_whole() -> None:
    for record in read_records():
        assert record.schema == record_module.SCHEMA and record.case["name"] and record.recipe


@pytest.mark.parametrize(
    ("verdicts", "passed"),
    [
        ({}, False),
        ({"gate": {"verdict": "pass"}}, True),
        ({"gate": {"verdict": "pass"}, "referee": {"verdict": "fail"}}, False),
        ({"gate": {"verdict": "fail"}}, False),
        ({"gate": {}}, False),
        ({"gate": {"verdict": None}}, False),
        ({"gate": {"verdict": "passed"}}, False),
    ],
)
def test_passed_means_judged_and_never_found_wrong(verdicts: dict[str, Any], passed: bool) -> None:
    assert a_record(small(), "fp32", verdicts=verdicts).passed is passed


def test_what_was_not_measured_is_none() -> None:
    record = a_record(small(), "fp32", None)
    assert (record.median_s, record.tflops, record.of_the_wall) == (None, None, None)


def test_rates_come_from_the_median_and_the_slower_wall() -> None:
    record = a_record(small(), "fp32", pass_s=(1.0, 9.0, 2.0), flops=int(4e12), card_s=(1.5, 0.5), road_s=(0.7,))
    assert record.median_s == 2.0
    assert math.isclose(record.tflops or 0, 2.0)
    assert math.isclose(record.of_the_wall or 0, 0.5)


def test_the_source_fingerprint_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("x = 1")
    first = record_module.source_sha256()
    assert first == record_module.source_sha256() and len(first) == 16
    (tmp_path / "a.py").write_text("x = 2")
    second = record_module.source_sha256()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, record_module.source_sha256()}) == 3


def test_versions_name_what_numbers_depend_on_and_a_folder_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"python", "torch", "numpy"} <= set(record_module.versions())
    monkeypatch.setattr(record_module, "PACKAGE", tmp_path / "frontier")
    assert record_module.commit() is None
