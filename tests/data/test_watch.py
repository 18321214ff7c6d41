"""Watched rows are hashed going in, kept coming out, and written where the referee looks."""

import hashlib
import struct

import numpy as np
import pytest
import torch

from frontier.data.generate import SeededSource
from frontier.data.watch import Watcher
from frontier.errors import CaseError, DataError
from frontier.spans import Span, cut


@pytest.fixture
def case(make_case):
    return make_case(batch_size=5, seq_len=4100, d_model=2)


@pytest.fixture(name="x_BSD")
def some_rows(case) -> torch.Tensor:
    source = SeededSource(case, 2)
    x_BSD = torch.empty(5, 4100, 2)
    source.read(Span(0, 5), x_BSD)
    source.close()
    return x_BSD


def plain_hash(row_SD) -> str:
    """Section 6 of the contract, byte by byte."""
    digests = b""
    for block_SD in (row_SD[:4096], row_SD[4096:]):
        values = [float(value) for value in block_SD.reshape(-1)]
        digests += hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).digest()
    return hashlib.sha256(digests).hexdigest()


def carry(watcher: Watcher, x_BSD: torch.Tensor, y_BSD: torch.Tensor, rows_per_slice: int) -> None:
    """One pass, in slots that are used again."""
    slot_in, slot_out = (torch.empty(rows_per_slice, 4100, 2) for _ in range(2))
    for rows in cut(5, rows_per_slice):
        slot_in[: len(rows)] = x_BSD[rows.as_slice()]
        slot_out[: len(rows)] = y_BSD[rows.as_slice()]
        watcher.saw_input(rows, slot_in[: len(rows)])
        watcher.saw_output(rows, slot_out[: len(rows)])


@pytest.mark.parametrize("rows_per_slice", [1, 2, 5])
def test_watched_rows_are_saved_as_the_contract_says_however_they_are_cut(tmp_path, case, x_BSD, pool, rows_per_slice):
    watcher = Watcher(case, (4, 0, 3, 0), pool)
    carry(watcher, x_BSD, -x_BSD, rows_per_slice)
    entries = watcher.save(tmp_path)
    assert entries == [
        {
            "row": row,
            "input_sha256": plain_hash(x_BSD[row]),
            "output": f"watched/row_{row:08d}.npy",
            "output_sha256": plain_hash(-x_BSD[row]),
        }
        for row in (0, 3, 4)
    ]
    assert len({entry[key] for entry in entries for key in ("input_sha256", "output_sha256")}) == 6
    for entry in entries:
        saved_SD = np.load(tmp_path / entry["output"], allow_pickle=False)
        assert saved_SD.dtype == np.dtype("<f4") and saved_SD.flags.c_contiguous
        assert np.array_equal(saved_SD, -x_BSD[entry["row"]].numpy())
        assert plain_hash(saved_SD) == entry["output_sha256"]
    assert sorted(path.name for path in (tmp_path / "watched").iterdir()) == [f"row_{row:08d}.npy" for row in (0, 3, 4)]


@pytest.mark.parametrize("row", [-1, 5, 10**6])
def test_a_row_that_the_case_does_not_have_cannot_be_watched(case, pool, row):
    with pytest.raises(CaseError) as caught:
        Watcher(case, (0, row), pool)
    assert str(caught.value) == f"row {row} cannot be watched: case small has batch_size 5"
    assert caught.value.hint == "watch rows from 0 to 4"
    Watcher(case, (0, 4), pool)


def test_an_input_row_that_changes_between_passes_is_refused(case, x_BSD, pool, refusal):
    watcher = Watcher(case, (3,), pool)
    carry(watcher, x_BSD, x_BSD, 2)
    carry(watcher, x_BSD, x_BSD, 5)
    changed_BSD = x_BSD.clone()
    changed_BSD[2, 0, 0] += 1
    carry(watcher, changed_BSD, x_BSD, 1)
    changed_BSD.view(torch.int32)[3, 4099, 1] ^= 1
    was, now = plain_hash(x_BSD[3])[:12], plain_hash(changed_BSD[3])[:12]
    assert refusal(carry, watcher, changed_BSD, x_BSD, 2) == (
        f"input row 3 changed between two passes: its hash was {was}… and is {now}…",
        "run again on an input that nothing else writes to; if it is seeded, test the host's memory",
    )


def test_a_later_pass_replaces_the_kept_output(tmp_path, case, x_BSD, pool):
    watcher = Watcher(case, (1,), pool)
    carry(watcher, x_BSD, x_BSD + 1, 2)
    carry(watcher, x_BSD, x_BSD + 2, 2)
    (entry,) = watcher.save(tmp_path)
    saved_SD = np.load(tmp_path / entry["output"])
    assert np.array_equal(saved_SD, (x_BSD[1] + 2).numpy()) and not np.array_equal(saved_SD, (x_BSD[1] + 1).numpy())


def test_only_rows_that_went_in_and_came_out_are_saved(tmp_path, case, x_BSD, pool):
    watcher = Watcher(case, (0, 1, 2), pool)
    watcher.saw_input(Span(0, 2), x_BSD[:2])
    watcher.saw_output(Span(1, 3), x_BSD[1:3])
    assert [entry["row"] for entry in watcher.save(tmp_path)] == [1]
    assert [path.name for path in (tmp_path / "watched").iterdir()] == ["row_00000001.npy"]


def test_watching_nothing_saves_nothing(tmp_path, case, x_BSD, pool):
    watcher = Watcher(case, (), pool)
    carry(watcher, x_BSD, x_BSD, 2)
    assert watcher.save(tmp_path) == []
    assert list((tmp_path / "watched").iterdir()) == []


def test_saving_again_replaces_what_an_interrupted_run_left(tmp_path, case, x_BSD, pool):
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched/row_00000001.npy.partial").write_text("left")
    (tmp_path / "watched/row_00000001.npy").write_text("old")
    watcher = Watcher(case, (1,), pool)
    carry(watcher, x_BSD, x_BSD, 2)
    first, again = watcher.save(tmp_path), watcher.save(tmp_path)
    assert first == again and np.array_equal(np.load(tmp_path / first[0]["output"]), x_BSD[1].numpy())
    assert [path.name for path in (tmp_path / "watched").iterdir()] == ["row_00000001.npy"]


def test_a_run_directory_that_cannot_hold_watched_rows_is_a_sentence(tmp_path, case, x_BSD, pool, refusal):
    watcher = Watcher(case, (1,), pool)
    carry(watcher, x_BSD, x_BSD, 2)
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/watched").touch()
    for name, reason in (("none", "No such file or directory"), ("file", "Not a directory"), ("taken", "File exists")):
        assert refusal(watcher.save, tmp_path / name) == (
            f"{tmp_path}/{name}/watched cannot be made: {reason}",
            "name another run directory",
        )
    watcher.save(tmp_path)


def test_a_disk_too_small_for_watched_rows_is_a_sentence_and_nothing_half_is_left(
    small_disk, make_case, case, x_BSD, pool, refusal
):
    watcher = Watcher(case, (1, 2), pool)
    carry(watcher, x_BSD, x_BSD, 5)
    told, hint = refusal(watcher.save, small_disk)
    assert told.startswith(f"{small_disk}/watched/row_00000002.npy needs 32.16 KiB (32,928 bytes), ")
    assert told.endswith("are free: No space left on device") and hint.startswith("free space")
    assert [path.name for path in (small_disk / "watched").iterdir()] == ["row_00000001.npy"]


def test_rows_that_are_not_the_cases_are_our_own_mistake(case, x_BSD, pool):
    watcher = Watcher(case, (1,), pool)
    for see in (watcher.saw_input, watcher.saw_output):
        with pytest.raises(AssertionError):
            see(Span(0, 2), x_BSD)
        see(Span(0, 5), x_BSD)
    with pytest.raises(DataError):
        watcher.saw_input(Span(0, 5), x_BSD + 1)
