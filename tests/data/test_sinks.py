"""An output bears its name only when it is whole, and every way of failing is a sentence that leaves nothing half."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from frontier.data import sinks, writing
from frontier.data.sinks import MemorySink, NpySink, NullSink
from frontier.errors import DataError
from frontier.spans import Span, cut

ALL = Span(0, 3)
OVERWRITE = "name another file, or allow it with --overwrite"
LEFT_OVER = "move it away if you need its rows, or allow it to be replaced with --overwrite"
LARGER_DISK = "free space, or name a file on a larger disk"


@pytest.fixture(name="y_BSD")
def some_rows() -> torch.Tensor:
    return torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(8))


def saved_bytes(y_BSD: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, y_BSD.numpy())
    return file.getvalue()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_all(sink, y_BSD: torch.Tensor) -> None:
    sink.write(Span(0, len(y_BSD)), y_BSD)


# A whole output


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("piece_bytes", [100, 1 << 24])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2)])
def test_rows_in_any_order_make_the_file_that_numpy_saves(
    tmp_path, case, y_BSD, monkeypatch, order, piece_bytes, threads
):
    monkeypatch.setattr(sinks, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "y.npy"
    sink = NpySink(path, case, threads=threads)
    for row in order:
        sink.write(Span(row, row + 1), y_BSD[row : row + 1])
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert path.read_bytes() != saved_bytes(y_BSD.flip(0))
    assert names(tmp_path) == ["y.npy"]


def test_the_tensor_may_be_reused_as_soon_as_write_returns(tmp_path, case, y_BSD):
    sink = NpySink(tmp_path / "y.npy", case)
    lent_BSD = torch.empty(2, 40, 6)
    for rows in cut(3, 2):
        lent_BSD[: len(rows)] = y_BSD[rows.as_slice()]
        sink.write(rows, lent_BSD[: len(rows)])
        lent_BSD.fill_(float("nan"))
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_second_pass_writes_the_same_file_anew(tmp_path, case, y_BSD):
    sink = NpySink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD + 1)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD) != saved_bytes(y_BSD + 1)


def test_the_name_is_there_only_when_the_file_is_whole(tmp_path, case, y_BSD):
    sink = NpySink(tmp_path / "y.npy", case)
    assert names(tmp_path) == ["y.npy.partial"]
    assert (tmp_path / "y.npy.partial").stat().st_size == len(saved_bytes(y_BSD)), "no space was reserved"
    write_all(sink, y_BSD)
    assert names(tmp_path) == ["y.npy.partial"]
    sink.finish()
    assert names(tmp_path) == ["y.npy"]


def test_short_writes_are_gone_on_with(tmp_path, case, y_BSD, monkeypatch):
    real_pwrite, calls = os.pwrite, []

    def short_pwrite(fd, data, offset):
        calls.append(offset)
        return real_pwrite(fd, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    sink = NpySink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)
    assert len(calls) > len(saved_bytes(y_BSD)) // 7


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([], "no row of 3 is whole"),
        ([Span(1, 2)], "row 1 of 3 is whole"),
        ([Span(0, 2)], "rows 0-1 of 3 are whole"),
        ([Span(2, 3), Span(0, 1)], "rows 0, 2 of 3 are whole"),
    ],
)
def test_an_output_with_a_row_never_written_is_not_finished(tmp_path, case, y_BSD, refusal, written, missing):
    path = tmp_path / "y.npy"
    sink = NpySink(path, case)
    for rows in written:
        sink.write(rows, y_BSD[rows.as_slice()])
    assert refusal(sink.finish) == (
        f"{path} is not whole: {missing} in y.npy.partial",
        "run again; rows that are whole stay where they are until then",
    )
    assert names(tmp_path) == ["y.npy.partial"]
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


def test_a_row_whose_second_writing_failed_is_not_whole(tmp_path, case, y_BSD, monkeypatch, refusal):
    sink = NpySink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)

    def failing_pwrite(fd, data, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "pwrite", failing_pwrite)
        assert refusal(sink.write, Span(1, 2), y_BSD[1:2]) == (
            f"{tmp_path}/y.npy cannot be written: Input/output error",
            "name a file on a sound disk",
        )
    assert refusal(sink.finish)[0] == f"{tmp_path}/y.npy is not whole: rows 0, 2 of 3 are whole in y.npy.partial"
    sink.write(Span(1, 2), y_BSD[1:2])
    sink.finish()


# Names that are taken or cannot be


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("old.npy", "{path} exists already", OVERWRITE),
        ("dangling.npy", "{path} exists already", OVERWRITE),
        ("dir.npy", "{path} is a directory", "name a file in it"),
        ("y.bin", "{path} ends in `.bin`, an output ends in .npy", "name it y.npy"),
        ("y", "{path} ends in ``, an output ends in .npy", "name it y.npy"),
        ("none/y.npy", "y.npy cannot go to {parent}: No such file or directory", "make the directory first"),
        ("old.npy/y.npy", "y.npy cannot go to {parent}: Not a directory", "make the directory first"),
        ("left.npy", "{path}.partial is left from an interrupted run", LEFT_OVER),
        ("n" * 250 + ".npy", "{path}.partial cannot be created: File name too long", "name a file where you may write"),
    ],
)
def test_a_name_that_is_taken_or_cannot_be_is_refused(tmp_path, case, y_BSD, refusal, name, message, hint):
    (tmp_path / "dir.npy").mkdir()
    (tmp_path / "old.npy").write_text("old")
    (tmp_path / "dangling.npy").symlink_to("nowhere")
    (tmp_path / "left.npy.partial").write_text("left")
    before = names(tmp_path)
    path = tmp_path / name
    assert refusal(NpySink, path, case) == (message.format(path=path, parent=path.parent), hint)
    assert names(tmp_path) == before
    assert (tmp_path / "old.npy").read_text() == "old" and (tmp_path / "left.npy.partial").read_text() == "left"
    sink = NpySink(tmp_path / "free.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert names(tmp_path) == sorted([*before, "free.npy"])


def test_overwriting_replaces_an_output_only_when_the_new_one_is_whole(tmp_path, case, y_BSD):
    path = tmp_path / "y.npy"
    path.write_text("old")
    sink = NpySink(path, case, overwrite=True)
    write_all(sink, y_BSD)
    assert path.read_text() == "old"
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert names(tmp_path) == ["y.npy"]


def test_overwriting_replaces_what_an_interrupted_run_left(tmp_path, case, y_BSD):
    (tmp_path / "y.npy.partial").write_bytes(b"left" * 5000)
    sink = NpySink(tmp_path / "y.npy", case, overwrite=True)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_link_in_the_place_of_the_part_is_not_followed(tmp_path, case, y_BSD, refusal):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "y.npy.partial").symlink_to("precious")
    assert refusal(NpySink, tmp_path / "y.npy", case, overwrite=True) == (
        f"{tmp_path}/y.npy.partial cannot be created: Too many levels of symbolic links",
        "name a file where you may write",
    )
    assert (tmp_path / "precious").read_text() == "precious"
    (tmp_path / "y.npy.partial").unlink()
    NpySink(tmp_path / "y.npy", case, overwrite=True).abandon()


def test_a_name_taken_while_we_ran_is_not_overwritten(tmp_path, case, y_BSD, refusal):
    path = tmp_path / "y.npy"
    sink = NpySink(path, case)
    write_all(sink, y_BSD)
    path.write_text("theirs")
    assert refusal(sink.finish) == (f"{path} exists already", OVERWRITE)
    assert path.read_text() == "theirs"
    path.unlink()
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


def test_a_directory_that_may_only_be_read_is_refused(small_disk, case, refusal):
    NpySink(small_disk / "y.npy", case).abandon()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert refusal(NpySink, small_disk / "y.npy", case) == (
        f"{small_disk}/y.npy.partial cannot be created: Read-only file system",
        "name a file where you may write",
    )
    assert names(small_disk) == []


def test_a_directory_that_may_not_be_entered_is_a_sentence(tmp_path, case, monkeypatch, refusal):
    real_stat = os.stat

    def closed_stat(path, **options):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real_stat(path, **options)

    with monkeypatch.context() as closed:
        closed.setattr(os, "stat", closed_stat)
        assert refusal(NpySink, tmp_path / "y.npy", case) == (
            f"y.npy cannot go to {tmp_path}: Permission denied",
            "make the directory first",
        )
    NpySink(tmp_path / "y.npy", case).abandon()


# Two runs on one output


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_sink_on_one_output_is_refused(tmp_path, case, y_BSD, refusal, overwrite):
    path = tmp_path / "y.npy"
    first = NpySink(path, case)
    write_all(first, y_BSD)
    assert refusal(NpySink, path, case, overwrite) == (
        f"another run is writing {path}",
        "wait for it, or name another file",
    )
    first.finish()
    assert path.read_bytes() == saved_bytes(y_BSD), "the second sink harmed the first one's file"
    NpySink(path, case, overwrite=True).abandon()


def test_an_abandoned_sink_does_not_remove_its_successors_part(tmp_path, case):
    first = NpySink(tmp_path / "y.npy", case)
    first.abandon()
    second = NpySink(tmp_path / "y.npy", case)
    first.abandon()
    assert names(tmp_path) == ["y.npy.partial"]
    second.abandon()
    assert names(tmp_path) == []


KILLED = """
import sys, torch
from pathlib import Path
from frontier.case import Case
from frontier.data.sinks import NpySink
from frontier.spans import Span
case = Case(name="small", batch_size=3, seq_len=40, d_model=6, heads=2, ffn_dim=8, layers=1)
sink = NpySink(Path(sys.argv[1]), case)
row = 0
while True:
    sink.write(Span(row % 2, row % 2 + 1), torch.full((1, 40, 6), float(row)))
    row += 1
    if row == 2:
        print("writing", flush=True)
"""


def test_a_run_killed_while_it_writes_leaves_only_its_part(tmp_path, case, y_BSD, refusal):
    path = tmp_path / "y.npy"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "writing\n"
            assert refusal(NpySink, path, case, overwrite=True)[0] == f"another run is writing {path}"
        finally:
            run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["y.npy.partial"]
    assert refusal(NpySink, path, case) == (f"{path}.partial is left from an interrupted run", LEFT_OVER)
    sink = NpySink(path, case, overwrite=True)
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert names(tmp_path) == ["y.npy"]


# Full and failing disks


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_too_small_is_refused_before_the_first_row_and_left_as_it_was(
    small_disk, make_case, case, y_BSD, refusal, overwrite
):
    path = small_disk / "y.npy"
    if overwrite:
        path.write_text("old")
    before = names(small_disk)
    told, hint = refusal(NpySink, path, make_case(), overwrite)
    free = "60.00 KiB (61,440 bytes)" if overwrite else "64.00 KiB (65,536 bytes)"
    assert told == f"{path} needs 351.69 KiB (360,128 bytes), {free} are free: No space left on device"
    assert hint == LARGER_DISK
    assert names(small_disk) == before and (not overwrite or path.read_text() == "old")
    sink = NpySink(path, case, overwrite)
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


@pytest.mark.parametrize("reason", [errno.EOPNOTSUPP, errno.EINVAL])
def test_where_space_cannot_be_reserved_it_is_counted(small_disk, make_case, case, y_BSD, monkeypatch, refusal, reason):
    def refusing_fallocate(fd, offset, length):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "posix_fallocate", refusing_fallocate)
    told, hint = refusal(NpySink, small_disk / "y.npy", make_case())
    assert told.endswith("64.00 KiB (65,536 bytes) are free: No space left on device") and hint == LARGER_DISK
    assert names(small_disk) == []
    sink = NpySink(small_disk / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert (small_disk / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_another_failure_to_reserve_is_not_taken_for_a_missing_call(tmp_path, case, monkeypatch, refusal):
    def failing_fallocate(fd, offset, length):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", failing_fallocate)
    told, hint = refusal(NpySink, tmp_path / "y.npy", case)
    assert told.startswith(f"{tmp_path}/y.npy needs 2.94 KiB (3,008 bytes), ") and told.endswith(": File too large")
    assert hint == LARGER_DISK and names(tmp_path) == []


def test_a_disk_that_fills_up_in_spite_of_all_is_a_sentence_and_the_part_is_kept(
    small_disk, make_case, monkeypatch, refusal
):
    monkeypatch.setattr(writing, "_reserve", lambda fd, path, needed_bytes: None)
    case = make_case(seq_len=1000)
    path = small_disk / "y.npy"
    sink = NpySink(path, case)
    sink.write(Span(0, 2), torch.zeros(2, 1000, 6))
    told, hint = refusal(sink.write, Span(2, 3), torch.zeros(1, 1000, 6))
    assert told == f"the disk filled up while {path} was written: 0 B free (No space left on device)"
    assert hint == LARGER_DISK
    assert sink.abandon() == "rows 0-1 of 3 are whole in y.npy.partial"
    assert names(small_disk) == ["y.npy.partial"]


def test_a_disk_that_fails_at_the_end_leaves_no_output(tmp_path, case, y_BSD, monkeypatch, refusal):
    sink = NpySink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)

    def failing_fsync(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", failing_fsync)
        assert refusal(sink.finish) == (
            f"{tmp_path}/y.npy cannot be written: Input/output error",
            "name a file on a sound disk",
        )
    assert names(tmp_path) == ["y.npy.partial"]
    sink.finish()
    assert names(tmp_path) == ["y.npy"]


# Stopping early


@pytest.mark.parametrize(
    ("written", "sentence", "left"),
    [
        ([], "no row is whole, y.npy.partial is removed", []),
        ([Span(2, 3)], "row 2 of 3 is whole in y.npy.partial", ["y.npy.partial"]),
        ([Span(1, 3)], "rows 1-2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
        ([Span(0, 1), Span(2, 3)], "rows 0, 2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
        ([ALL], "rows 0-2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
    ],
)
def test_abandoning_says_what_is_safe_and_where(tmp_path, case, y_BSD, written, sentence, left):
    sink = NpySink(tmp_path / "y.npy", case)
    for rows in written:
        sink.write(rows, y_BSD[rows.as_slice()])
    assert sink.abandon() == sentence
    assert sink.abandon() == sentence
    assert names(tmp_path) == left
    for rows in written:
        kept = (tmp_path / "y.npy.partial").read_bytes()[128:]
        assert kept[rows.start * 960 : rows.stop * 960] == y_BSD[rows.as_slice()].numpy().tobytes()


def test_abandoning_a_finished_output_leaves_it_whole(tmp_path, case, y_BSD):
    sink = NpySink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert sink.abandon() == "y.npy is whole"
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_sink_of_any_end_leaves_no_file_open(tmp_path, case, y_BSD):
    before = set(os.listdir("/proc/self/fd"))
    for ending in ("finish", "abandon"):
        sink = NpySink(tmp_path / "y.npy", case, overwrite=True)
        write_all(sink, y_BSD)
        assert set(os.listdir("/proc/self/fd")) > before
        getattr(sink, ending)()
        assert set(os.listdir("/proc/self/fd")) == before
    for _ in range(2):
        with pytest.raises(DataError):
            NpySink(tmp_path / "y.npy", case)
    assert set(os.listdir("/proc/self/fd")) == before


# Sinks without a file


def test_a_memory_sink_keeps_copies_and_shows_what_was_never_written(case, y_BSD):
    sink = MemorySink(case, threads=2)
    assert sink.host_BSD.isnan().all()
    lent_BSD = y_BSD[1:].clone()
    sink.write(Span(1, 3), lent_BSD)
    lent_BSD.zero_()
    assert torch.equal(sink.host_BSD[1:], y_BSD[1:]) and sink.host_BSD[0].isnan().all()
    sink.finish()
    write_all(sink, y_BSD + 1)
    assert torch.equal(sink.host_BSD, y_BSD + 1)
    assert sink.abandon() == "the output was in memory and is gone"


def test_a_null_sink_takes_all_and_keeps_none(y_BSD):
    sink = NullSink()
    write_all(sink, y_BSD)
    sink.finish()
    assert sink.abandon() == "no output was kept"
    assert vars(sink) == {}


@pytest.mark.parametrize("make_sink", [MemorySink, lambda case: NpySink("y.npy", case)])
def test_rows_that_are_not_the_cases_are_our_own_mistake(tmp_path, case, y_BSD, monkeypatch, make_sink):
    monkeypatch.chdir(tmp_path)
    sink = make_sink(case)
    for rows, host_BSD in (
        (Span(1, 4), y_BSD),
        (Span(0, 2), y_BSD),
        (ALL, y_BSD.double()),
        (ALL, y_BSD.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        with pytest.raises(AssertionError):
            sink.write(rows, host_BSD)
    write_all(sink, y_BSD)
    sink.abandon()
