"""A disk that is too small, fills up or fails is a sentence that leaves nothing half under the output's name."""

import errno
import os

import pytest
import torch
from output_files import LARGER_DISK, SOUND_DISK, names, saved_bytes, write_all

from frontier.data import writing
from frontier.data.sinks import FileSink
from frontier.spans import Span


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_too_small_is_refused_before_the_first_row_and_left_as_it_was(
    small_disk, make_case, case, y_BSD, refusal, overwrite
):
    path = small_disk / "y.npy"
    if overwrite:
        path.write_text("old")
    before = names(small_disk)
    told, hint = refusal(FileSink, path, make_case(), overwrite)
    free = "60.00 KiB (61,440 bytes)" if overwrite else "64.00 KiB (65,536 bytes)"
    assert told == f"{path} needs 351.69 KiB (360,128 bytes), {free} are free: No space left on device"
    assert hint == LARGER_DISK
    assert names(small_disk) == before and (not overwrite or path.read_text() == "old")
    sink = FileSink(path, case, overwrite)
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


@pytest.mark.parametrize("reason", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_space_cannot_be_reserved_it_is_counted(
    small_disk, make_case, case, y_BSD, monkeypatch, failing, refusal, reason
):
    monkeypatch.setattr(os, "posix_fallocate", failing(reason))
    told, hint = refusal(FileSink, small_disk / "y.npy", make_case())
    assert told.endswith("64.00 KiB (65,536 bytes) are free: No space left on device") and hint == LARGER_DISK
    assert names(small_disk) == []
    sink = FileSink(small_disk / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert (small_disk / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_another_failure_to_reserve_is_not_taken_for_a_missing_call(tmp_path, case, monkeypatch, failing, refusal):
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EFBIG))
    told, hint = refusal(FileSink, tmp_path / "y.npy", case)
    assert told.startswith(f"{tmp_path}/y.npy needs 2.94 KiB (3,008 bytes), ") and told.endswith(": File too large")
    assert hint == LARGER_DISK and names(tmp_path) == []


def test_a_disk_that_fills_up_in_spite_of_all_is_a_sentence_and_the_part_is_kept(
    small_disk, make_case, monkeypatch, refusal
):
    monkeypatch.setattr(writing, "_reserve", lambda fd, path, needed_bytes: None)
    case = make_case(seq_len=1000)
    path = small_disk / "y.npy"
    sink = FileSink(path, case)
    sink.write(Span(0, 2), torch.zeros(2, 1000, 6))
    told, hint = refusal(sink.write, Span(2, 3), torch.zeros(1, 1000, 6))
    assert told == f"the disk filled up while {path} was written: 0 B free (No space left on device)"
    assert hint == LARGER_DISK
    assert sink.abandon() == "rows 0-1 of 3 are whole in y.npy.partial"
    assert names(small_disk) == ["y.npy.partial"]


def test_a_row_whose_second_writing_failed_is_not_whole(tmp_path, case, y_BSD, monkeypatch, failing, refusal):
    sink = FileSink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", failing(errno.EIO))
        assert refusal(sink.write, Span(1, 2), y_BSD[1:2]) == (
            f"{tmp_path}/y.npy cannot be written: Input/output error",
            SOUND_DISK,
        )
    assert refusal(sink.finish)[0] == f"{tmp_path}/y.npy is not whole: rows 0, 2 of 3 are whole in y.npy.partial"
    sink.write(Span(1, 2), y_BSD[1:2])
    sink.finish()


def test_a_disk_that_fails_at_the_end_leaves_no_output(tmp_path, case, y_BSD, monkeypatch, failing, refusal):
    sink = FileSink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(errno.EIO))
        assert refusal(sink.finish) == (f"{tmp_path}/y.npy cannot be written: Input/output error", SOUND_DISK)
    assert names(tmp_path) == ["y.npy.partial"]
    sink.finish()
    assert names(tmp_path) == ["y.npy"]
