"""Whatever fails, wherever in a run: the error surfaces, nothing hangs, threads end, and --resume goes on."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commandline import assert_refused, is_complete, judge, run, try_run

from frontier.data import writing
from frontier.data.files import FileSource
from frontier.data.generate import SeededSource
from frontier.data.sinks import FileSink
from frontier.data.watch import Watcher
from frontier.errors import DataError
from frontier.flows.whole import WholeRows
from frontier.rundir import RunDir
from frontier.stream import journal

OUT = ("--output", "y.npy")
SLICES = 3


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_S", 0.0)


def system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def fails_at(turn: int, true_call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`true_call`, but for one time; counted over threads."""
    done, lock = 0, threading.Lock()

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal done
        with lock:
            done += 1
            if done == turn + 1:
                raise error
        return true_call(*arguments, **named)

    return call


PLACES: dict[str, tuple[Any, str, BaseException, int, str]] = {
    "reading": (SeededSource, "read", DataError("the row is gone", hint="h"), 2, "the row is gone"),
    "reading, short of memory": (SeededSource, "read", MemoryError("no memory"), 2, "no memory"),
    "computing": (WholeRows, "work", RuntimeError("an illegal access"), 2, "an illegal access"),
    "computing, short of memory": (WholeRows, "work", torch.OutOfMemoryError("x"), 3, "the card ran out of memory"),
    "hashing the input": (Watcher, "saw_input", DataError("no such row", hint="h"), 2, "no such row"),
    "keeping the output": (Watcher, "saw_output", DataError("no room", hint="h"), 2, "no room"),
    "writing": (FileSink, "write", DataError("the disk is full", hint="h"), 2, "the disk is full"),
    "writing a piece": (os, "pwrite", system_error(errno.EIO), 2, "y.npy cannot be written: Input/output error"),
    "a full disk": (os, "pwrite", system_error(errno.ENOSPC), 2, "the disk filled up while"),
    "syncing rows": (os, "fdatasync", system_error(errno.EIO), 2, "y.npy cannot be written: Input/output error"),
    "saying so": (journal, "_write_all", system_error(errno.ENOSPC), 2, "journal.jsonl cannot be written: No space"),
}  # fmt: skip


def our_threads() -> list[str]:
    names = ("frontier-", "read", "write", "keep", "generate")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def undisturbed() -> bytes:
    run("--output", "z.npy", run_dir="undisturbed")
    return Path("z.npy").read_bytes()


def assert_goes_on(wanted: bytes) -> None:
    assert not Path("y.npy").exists() and not is_complete()
    run(*OUT, "--resume")
    assert Path("y.npy").read_bytes() == wanted
    assert judge().exit_code == 0


# Rows that come while the disk is busy share a sync: only the first one, and two lines, are sure to come.
TURNS = {"syncing rows": 1, "saying so": 2}


@pytest.mark.parametrize(("place", "turn"), [(p, turn) for p in PLACES for turn in range(TURNS.get(p, SLICES))])
def test_a_failure_at_any_place_surfaces_and_the_run_goes_on(place: str, turn: int) -> None:
    owner, name, error, exit_code, told = PLACES[place]
    wanted = undisturbed()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails_at(turn, getattr(owner, name), error))
        assert_refused(try_run(*OUT, "--ring-depth", "2"), exit_code, told)
    assert our_threads() == []
    assert set(os.listdir("/proc/self/fd")) == before
    assert_goes_on(wanted)


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_failure_to_bring_the_whole_file_to_its_name_surfaces_and_the_run_goes_on(name: str) -> None:
    wanted = undisturbed()
    true_call = getattr(os, name)

    def failing(*arguments: Any) -> Any:
        at_output = name == "rename" or (
            stat.S_ISREG(os.fstat(arguments[0]).st_mode)
            and os.readlink(f"/proc/self/fd/{arguments[0]}").endswith("/y.npy.partial")
        )
        if at_output:
            raise system_error(errno.EIO)
        return true_call(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, failing)
        assert_refused(try_run(*OUT), 2, "y.npy cannot be written: Input/output error")
    assert our_threads() == []
    assert_goes_on(wanted)


@pytest.mark.parametrize(("owner", "name"), [(Watcher, "save"), (RunDir, "finish")])
def test_a_failure_after_the_output_has_its_name_keeps_it_and_the_run_goes_on(owner: type, name: str) -> None:
    wanted = undisturbed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails_at(0, getattr(owner, name), DataError("no room for it", hint="h")))
        assert_refused(try_run(*OUT), 2, "no room for it")
    assert Path("y.npy").read_bytes() == wanted and not is_complete()
    run(*OUT, "--resume")
    assert Path("y.npy").read_bytes() == wanted and judge().exit_code == 0


def test_a_failing_input_file_surfaces_and_the_run_goes_on() -> None:
    np.save("x.npy", np.random.default_rng(3).standard_normal((5, 150, 64)).astype(np.float32))
    run("--output", "z.npy", "--input", "x.npy", run_dir="undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSource, "read", fails_at(2, FileSource.read, DataError("a bad sector", hint="h")))
        assert_refused(try_run(*OUT, "--input", "x.npy"), 2, "a bad sector")
    run(*OUT, "--input", "x.npy", "--resume")
    assert Path("y.npy").read_bytes() == Path("z.npy").read_bytes()


@pytest.fixture
def small_disk(folder: Path, mount_small_disk: Callable[[Path, str], Path]) -> Path:
    """A filesystem of 256 KiB; the output takes 188."""
    return mount_small_disk(folder / "disk", "256k")


def test_a_disk_that_fills_up_part_way_keeps_the_finished_rows_and_the_run_goes_on(small_disk: Path) -> None:
    wanted = undisturbed()
    (small_disk / "hog").write_bytes(b"x" * 120_000)
    to_disk = ("--output", small_disk / "y.npy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_reserve", lambda fd, path, needed_bytes: os.ftruncate(fd, needed_bytes))
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
        done = try_run(*to_disk)
    assert_refused(done, 2, "the disk filled up while", "No space left on device")
    (small_disk / "hog").unlink()
    run(*to_disk, "--resume")
    assert (small_disk / "y.npy").read_bytes() == wanted
    assert '"done_rows": 2' in Path("kept/record.json").read_text()


def test_two_runs_on_one_output_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts, even with --overwrite or --resume, while the first writes."""
    wanted = undisturbed()
    second: list[Any] = []
    true_write = FileSink.write

    def write(self: FileSink, *arguments: Any) -> None:
        if not second:
            second.append(None)
            second[:] = [try_run(*OUT, *words, run_dir="second") for words in ((), ("--overwrite",), ("--resume",))]
        true_write(self, *arguments)

    monkeypatch.setattr(FileSink, "write", write)
    monkeypatch.setattr("frontier.cli.signal.signal", lambda *arguments: None)  # not on the writer's thread
    monkeypatch.setattr("frontier.runner.using_card", lambda machine: pytest.MonkeyPatch.context())
    run(*OUT)
    for done in second:
        assert done.exit_code == 2 and "another run is writing y.npy" in done.stderr, done.stderr
    assert Path("y.npy").read_bytes() == wanted and not Path("second").exists()
