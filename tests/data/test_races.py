"""What others do between two of our steps, and what a mapped output would have done instead."""

import fcntl
import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch

from frontier.data.masks import open_mask
from frontier.data.reading import InputFile
from frontier.data.sinks import FileSink
from frontier.spans import Span


@pytest.mark.parametrize("meanwhile", ["renamed", "removed", "replaced", "nothing"])
def test_a_part_that_its_owner_gives_away_before_our_lock_is_not_taken(tmp_path, case, monkeypatch, refusal, meanwhile):
    partial = tmp_path / "y.npy.partial"
    partial.write_bytes(b"rows of another run")
    lock = fcntl.flock

    def lock_late(fd: int, operation: int) -> None:
        if meanwhile == "renamed":
            partial.rename(tmp_path / "y.npy")
        elif meanwhile == "removed":
            partial.unlink()
        elif meanwhile == "replaced":
            partial.unlink()
            partial.write_bytes(b"rows of a third run")
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    if meanwhile == "nothing":
        FileSink(tmp_path / "y.npy", case, overwrite=True).abandon()
        assert not partial.exists()
        return
    message, hint = refusal(FileSink, tmp_path / "y.npy", case, overwrite=True)
    assert message == f"another run is writing {tmp_path / 'y.npy'}"
    assert hint == "wait for it, or name another file"
    if meanwhile == "renamed":
        assert (tmp_path / "y.npy").read_bytes() == b"rows of another run"
    if meanwhile == "replaced":
        assert partial.read_bytes() == b"rows of a third run"


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_finish_returns(tmp_path, case, monkeypatch):
    steps: list[str] = []
    sync, rename = os.fsync, os.rename

    def watched_sync(fd: int) -> None:
        steps.append("sync directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        sync(fd)

    def watched_rename(*names: str) -> None:
        steps.append("rename")
        rename(*names)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "rename", watched_rename)
    sink = FileSink(tmp_path / "y.npy", case)
    sink.write(Span(0, 3), torch.zeros(3, 40, 6))
    assert steps == []
    sink.finish()
    assert steps == ["sync file", "rename", "sync directory"]


@pytest.mark.parametrize("grows", [True, False])
def test_a_mask_that_changes_while_it_is_read_is_refused(tmp_path, case, monkeypatch, refusal, grows):
    path = tmp_path / "mask.npy"
    np.save(path, np.ones((3, 40), dtype=bool))
    size_bytes = path.stat().st_size
    read_into = InputFile.read_into

    def read_and_grow(file: InputFile, into: memoryview, offset_bytes: int) -> None:
        read_into(file, into, offset_bytes)
        if grows and offset_bytes:
            path.write_bytes(path.read_bytes() + b"\1")

    monkeypatch.setattr(InputFile, "read_into", read_and_grow)
    if not grows:
        assert open_mask(path, case).all()
        return
    message, hint = refusal(open_mask, path, case)
    assert message == f"{path} changed while we ran: {size_bytes} bytes when opened, {size_bytes + 1} now"
    assert hint == "run again on a file that nothing else writes to"


FILL_MAPPED = """
import sys, numpy
numpy.lib.format.open_memmap(sys.argv[1], mode="w+", dtype="<f4", shape=(3, 4000, 6))[:] = 1
"""


def test_a_full_disk_that_kills_a_mapped_output_is_a_sentence_here(small_disk, make_case, refusal):
    # 288,000 bytes on a disk of 64 KiB: sparse, a mapped file of that size is made without complaint.
    mapped = subprocess.run([sys.executable, "-c", FILL_MAPPED, small_disk / "mapped.npy"], timeout=60)
    assert mapped.returncode == -signal.SIGBUS
    (small_disk / "mapped.npy").unlink()
    message, hint = refusal(FileSink, small_disk / "y.npy", make_case(seq_len=4000))
    assert message.startswith(f"{small_disk / 'y.npy'} needs 281.38 KiB (288,128 bytes), 64.00 KiB (65,536 bytes)")
    assert message.endswith("are free: No space left on device")
    assert hint == "free space, or name a file on a larger disk"
    assert list(small_disk.iterdir()) == []
