"""Starts `frontier` over and over by forking a process that has its imports behind it, and kills what it is told to.

A line of JSON on stdin asks for a run, a line on stdout says how it ended. Torch is imported and not yet used: its
threads would not survive a fork.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

# What changes a disk. A run that is killed just before any of these leaves whatever the ones before it left.
STEPS = ("open", "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "rename", "replace", "unlink")


def child(asked: dict[str, Any]) -> None:
    from frontier import planner, runner, timelock
    from frontier.cli import cli
    from frontier.stream import journal

    runner.source_sha256 = lambda: "0" * 64  # somebody may edit the sources between two starts
    planner.USUAL_SLICE_TOKENS = {True: 1, False: 1}  # a slice a row
    journal.MOST_S = 0.0  # every row is claimed at once
    timelock.folder = lambda: Path(asked["locks"])
    if asked.get("plant") == "claims first":
        claim_first()
    if asked.get("plant") == "claims parts first":
        claim_parts_first()
    if asked.get("kill_at"):
        count_steps(asked["kill_at"], asked.get("signal", signal.SIGKILL))
    cli.main(asked["words"], prog_name="frontier")


def claim_first() -> None:
    """A fault: rows are claimed, and the claim is on the disk, before they are written."""
    from frontier.data.sinks import FileSink

    true_write = FileSink.write

    def write(self: FileSink, rows: Any, *arguments: Any) -> None:
        assert self._journal is not None
        self._file.write_header()
        self._journal.add(rows)
        time.sleep(0.01)
        true_write(self, rows, *arguments)

    FileSink.write = write  # type: ignore[method-assign]


def claim_parts_first() -> None:
    """A fault: a part is claimed, and the claim is on the disk, before its last step is written."""
    from frontier.flows.chunked import ChunkedRows
    from frontier.flows.parts import Parts

    true_write, true_wrote = ChunkedRows.write, Parts.wrote

    def write(self: ChunkedRows, step: Any, *arguments: Any) -> None:
        if self._parts is not None:
            self._parts.will_write(step)
            true_wrote(self._parts, step)
            self._parts.journal.settle()
        true_write(self, step, *arguments)

    ChunkedRows.write = write  # type: ignore[method-assign]
    Parts.wrote = lambda self, step: None  # type: ignore[method-assign]


def count_steps(last: int, number: int) -> None:
    """A signal, SIGKILL for one, in place of step number `last`."""
    done, lock = 0, threading.Lock()

    def counted(true_step: Any) -> Any:
        def step(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            with lock:
                done += 1
                if done == last:
                    os.kill(os.getpid(), number)
            return true_step(*arguments, **named)

        return step

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def start(asked: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.chdir(asked["folder"])
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        child(asked)
        status = 0
    except SystemExit as ending:
        status = int(ending.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(status)


def serve() -> None:
    for room in ("chooser", "cli", "layers.canary", "show", "start"):
        import_module(f"frontier.{room}")
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.monotonic()
        pid = start(asked)
        if asked.get("signal_after_s") is not None:
            time.sleep(asked["signal_after_s"])
            os.kill(pid, asked.get("signal", signal.SIGKILL))
        ending = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"ending": ending, "took_s": time.monotonic() - began_s}), flush=True)


class Nursery:
    """The other side: a process that serves, from `with` to its end."""

    def __enter__(self) -> "Nursery":
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, folder: Path, *words: str, **asked: Any) -> dict[str, Any]:
        """How `frontier WORDS` in `folder` ended: the exit code or less a signal's number, seconds, stdout, stderr."""
        assert self._process.stdin is not None and self._process.stdout is not None
        (folder / "locks").mkdir(exist_ok=True)
        request = {"folder": str(folder), "locks": str(folder / "locks"), "words": list(words), **asked}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ended: dict[str, Any] = json.loads(self._process.stdout.readline())
        return ended | {name: (folder / name).read_text(errors="replace") for name in ("stdout", "stderr")}


if __name__ == "__main__":
    serve()
