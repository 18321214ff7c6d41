"""A journal claims a row when it is on the disk and not before; what is cut short or damaged claims nothing."""

import os
import threading
import time
from pathlib import Path

import pytest

from frontier.errors import DataError, ResumeError
from frontier.spans import Span
from frontier.stream import journal as journal_module
from frontier.stream.journal import Journal, Part, read_journal

RUN = "the run"
ROWS = 9


def hash_of(row: int) -> str:
    return f"{row:064x}"


def no_sync() -> None:
    """The disk is as fast as can be."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal whose four lines claim rows 0-1, 2-3 and 4-6, in this order."""
    path = tmp_path / "journal.jsonl"
    for claimed, new in (({}, Span(0, 2)), ({0: hash_of(0), 1: hash_of(1)}, Span(2, 4))):
        journal = Journal(path, RUN, hash_of, no_sync, claimed)
        journal.add(new)
        journal.close()
    first, *_ = path.read_bytes().splitlines()
    with path.open("ab") as file:
        file.write(journal_module._claim_lines({row: hash_of(row) for row in range(4, 7)})[0])
    assert len(path.read_bytes().splitlines()) == 4 and first.startswith(b'{"journal": 1, "run": "the run"}')
    return path


def claimed_rows(path: Path) -> set[int]:
    claims = read_journal(path, ROWS)
    assert claims is not None and claims.run == RUN
    assert claims.row_sha256 == {row: hash_of(row) for row in claims.row_sha256}
    return set(claims.row_sha256)


def test_what_was_claimed_is_read_back(path: Path) -> None:
    assert claimed_rows(path) == set(range(7))
    assert read_journal(path, ROWS).broken_lines == []  # type: ignore[union-attr]


def test_a_journal_cut_short_anywhere_loses_at_most_its_last_line(path: Path) -> None:
    whole = path.read_bytes()
    ends = [end for end, byte in enumerate(whole, start=1) if byte == ord("\n")]
    after = dict(zip(ends, ({*()}, {0, 1}, {0, 1, 2, 3}, set(range(7))), strict=True))
    for length in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:length])
        assert claimed_rows(path) == after[max(end for end in ends if end <= length)], length


def test_a_damaged_byte_costs_its_own_line_and_is_told(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        claims = read_journal(path, ROWS)
        assert claims is not None and claims.broken_lines, place
        lost = set(range(7)) - claimed_rows(path)
        # The byte between two lines belongs to both.
        assert lost in ({0, 1}, {2, 3}, {4, 5, 6}) or whole[place] == ord("\n"), place


def test_a_damaged_first_line_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(whole.index(b"\n")):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ResumeError, match="damaged in its first line"):
            read_journal(path, ROWS)


@pytest.mark.parametrize(
    "said",
    [
        {"rows": [7, 12], "sha256": [hash_of(0)] * 5},
        {"rows": [-1, 1], "sha256": [hash_of(0)] * 2},
        {"rows": [3, 3], "sha256": []},
        {"rows": [0, 2], "sha256": [hash_of(0)]},
        {"rows": [0, 1], "sha256": ["x" * 64]},
        {"rows": [0, 1], "sha256": [7]},
        {"rows": [False, True], "sha256": [hash_of(0)]},
        {"rows": "01", "sha256": [hash_of(0)]},
        {"rows": [0, 1, 2], "sha256": [hash_of(0)]},
        {},
    ],
)
def test_a_line_that_no_run_can_have_written_claims_nothing(path: Path, said: dict[str, object]) -> None:
    with path.open("ab") as file:
        file.write(journal_module._line(said))
    assert claimed_rows(path) == set(range(7))
    assert read_journal(path, ROWS).broken_lines == [5]  # type: ignore[union-attr]


def test_of_a_row_claimed_twice_the_last_line_counts(path: Path) -> None:
    with path.open("ab") as file:
        file.write(journal_module._line({"rows": [1, 2], "sha256": [hash_of(99)]}))
    claims = read_journal(path, ROWS)
    assert claims is not None and claims.row_sha256[1] == hash_of(99)


def test_rows_are_on_the_disk_before_a_line_says_so_and_the_line_is_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    true_write, true_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: steps.append("say") or true_write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append("sync") or true_sync(fd))
    journal = Journal(
        tmp_path / "j", RUN, lambda row: steps.append("hash") or hash_of(row), lambda: steps.append("keep"), {}
    )
    assert steps == ["say", "sync", "sync"], "first line, its file, its folder"
    steps.clear()
    journal.add(Span(0, 1))
    journal.close()
    assert steps == ["hash", "keep", "say", "sync"]


def test_rows_that_come_while_the_disk_is_busy_share_a_sync(tmp_path: Path) -> None:
    busy, go = threading.Event(), threading.Event()
    hashed: list[int] = []
    at_sync: list[list[int]] = []

    def slow_sync() -> None:
        at_sync.append(list(hashed))
        busy.set()
        assert go.wait(10)

    journal = Journal(tmp_path / "j", RUN, lambda row: hashed.append(row) or hash_of(row), slow_sync, {})
    journal.add(Span(0, 1))
    assert busy.wait(10)
    for row in (1, 2, 3, 6):
        journal.add(Span(row, row + 1))
    go.set()
    journal.close()
    assert at_sync == [[0], [0, 1, 2, 3, 6]]
    assert claimed_rows(tmp_path / "j") == {0, 1, 2, 3, 6}


def test_rows_are_hashed_as_they_come_and_claimed_when_it_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_S", 1000.0)
    monkeypatch.setattr(journal_module, "LEAST_S", 1000.0)
    syncs: list[None] = []
    seen = {row: threading.Event() for row in range(4)}
    journal = Journal(tmp_path / "j", RUN, lambda row: seen[row].set() or hash_of(row), lambda: syncs.append(None), {})
    for row in range(4):
        journal.add(Span(row, row + 1))
        assert seen[row].wait(10)
    assert len(claimed_rows(tmp_path / "j")) <= 1 and len(syncs) <= 1
    journal.close()
    assert claimed_rows(tmp_path / "j") == {0, 1, 2, 3} and len(syncs) == 2


def test_a_slow_disk_is_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_S", 60.0)
    monkeypatch.setattr(journal_module, "LEAST_S", 0.0)
    times: dict[float, int] = {}
    for sync_s in (0.0, 0.05):
        syncs: list[None] = []

        def sync(syncs: list[None] = syncs, sync_s: float = sync_s) -> None:
            syncs.append(None)
            time.sleep(sync_s)

        journal = Journal(tmp_path / f"{sync_s}", RUN, hash_of, sync, {})
        monkeypatch.setattr(journal_module, "TIMES_A_SYNC", 100.0 if sync_s else 0.0)
        for row in range(9):
            journal.add(Span(row, row + 1))
            time.sleep(0.02)
        journal.close()
        times[sync_s] = len(syncs)
    assert times[0.0] > 3 and times[0.05] == 2, times


def test_a_journal_that_cannot_be_kept_stops_the_run_and_claims_nothing(tmp_path: Path) -> None:
    def broken_sync() -> None:
        raise DataError("the disk failed")

    journal = Journal(tmp_path / "j", RUN, hash_of, broken_sync, {})
    journal.add(Span(0, 1))
    journal._thread.join(10)
    with pytest.raises(DataError, match="the disk failed"):
        journal.add(Span(1, 2))
    with pytest.raises(DataError, match="the disk failed"):
        journal.close()
    assert claimed_rows(tmp_path / "j") == set()


def test_where_none_is_there_is_no_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "j", ROWS) is None


def test_a_journal_larger_than_any_is_refused_unread(path: Path) -> None:
    os.truncate(path, 1 << 40)
    with pytest.raises(ResumeError, match=r"1\.00 TiB"):
        read_journal(path, ROWS)


def part(row: int, step: int) -> Part:
    return Part(row, step, hash_of(step))


def claimed_parts(path: Path) -> list[Part]:
    claims = read_journal(path, ROWS)
    assert claims is not None
    return claims.parts


def test_parts_of_the_row_under_way_are_read_back_until_it_is_whole(tmp_path: Path) -> None:
    path, parts = tmp_path / "j", [part(7, 0), part(7, 3)]
    journal = Journal(path, RUN, hash_of, no_sync, {0: hash_of(0)}, parts)
    assert claimed_parts(path) == parts and claimed_rows(path) == {0}, "what an earlier start had is said again"
    journal.add(lambda: part(7, 4))
    journal.settle()
    assert claimed_parts(path) == [*parts, part(7, 4)]
    journal.add(Span(7, 8))
    journal.settle()
    assert claimed_parts(path) == [] and claimed_rows(path) == {0, 7}
    journal.add(lambda: part(8, 1))
    journal.close()
    assert claimed_parts(path) == [part(8, 1)]


def test_parts_of_another_row_count_no_more_and_a_damaged_one_is_told(tmp_path: Path) -> None:
    path, parts = tmp_path / "j", [part(2, 0), part(7, 0), part(7, 3), part(7, 4)]
    Journal(path, RUN, hash_of, no_sync, {}, parts).close()
    assert claimed_parts(path) == parts[1:]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"x" + lines[3], lines[4]]))
    claims = read_journal(path, ROWS)
    assert claims is not None and (claims.parts, claims.broken_lines) == ([part(7, 0), part(7, 4)], [4])


@pytest.mark.parametrize(
    "said",
    [
        {"row": 9, "step": 0, "sha256": hash_of(0)},
        {"row": -1, "step": 0, "sha256": hash_of(0)},
        {"row": True, "step": 0, "sha256": hash_of(0)},
        {"row": 1, "step": -1, "sha256": hash_of(0)},
        {"row": 1, "step": 1.0, "sha256": hash_of(0)},
        {"row": 1, "step": [0], "sha256": hash_of(0)},
        {"row": 1, "step": 0, "sha256": [hash_of(0)]},
        {"row": 1, "step": 0, "sha256": "x"},
        {"row": 1, "step": 0},
    ],
)
def test_a_part_that_no_run_can_have_claimed_claims_nothing(path: Path, said: dict[str, object]) -> None:
    with path.open("ab") as file:
        file.write(journal_module._line(said))
    claims = read_journal(path, ROWS)
    assert claims is not None and (claims.parts, claims.broken_lines) == ([], [5])


def test_settling_claims_at_once_and_tells_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_S", 1000.0)
    monkeypatch.setattr(journal_module, "LEAST_S", 1000.0)
    journal = Journal(tmp_path / "j", RUN, hash_of, no_sync, {})
    for row in range(3):
        journal.add(Span(row, row + 1))
        journal.settle()
        assert claimed_rows(tmp_path / "j") == set(range(row + 1))

    def broken() -> Part:
        raise DataError("the disk failed")

    journal.add(broken)
    with pytest.raises(DataError, match="the disk failed"):
        journal.settle()
    with pytest.raises(DataError, match="the disk failed"):
        journal.close()
