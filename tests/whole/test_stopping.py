"""Ctrl-C and SIGTERM in the middle of a run: what is safe is said, and nothing half-valid bears a final name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commandline import assert_refused, run, try_run

from frontier.flows.engine import Engine

# 64 rows of 6 GFLOP: some ten seconds on two cores, stopped after the first slice of four rows.
SHAPE = {"batch-size": 64, "seq-len": 2048, "d-model": 128, "heads": 4, "ffn-dim": 128, "layers": 4}
LONG = ["--case", "14", "--device", "cpu", *(word for key, size in SHAPE.items() for word in (f"--{key}", str(size)))]
FRONTIER = [sys.executable, "-c", "from frontier.cli import cli; cli()"]
HEADER_BYTES = 128


def stop_when(ready: Callable[[], bool], with_signal: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`frontier run` of the long case, sent a signal once `ready`."""
    command = [*FRONTIER, "run", *LONG, "--run-dir", "kept", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + 30
        while not ready():
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < until_s, "it never came so far"
            time.sleep(0.02)
        child.send_signal(with_signal)
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def a_row_is_written() -> bool:
    path = Path("y.npy.partial")
    if not path.exists() or path.stat().st_size <= HEADER_BYTES:
        return False
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        return any(file.read(64))


@pytest.mark.parametrize(("with_signal", "quiet"), [(signal.SIGINT, []), (signal.SIGTERM, ["--quiet"])])
def test_a_stopped_run_says_what_is_safe(with_signal: int, quiet: list[str]) -> None:
    done = stop_when(a_row_is_written, with_signal, "--output", "y.npy", *quiet)
    assert done.returncode == 130, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    error, hint = done.stderr.splitlines() if quiet else done.stderr.splitlines()[-2:]
    assert error.startswith("error: stopped by request in pass 1 of 1: rows 0-") and "y.npy.partial" in error
    assert hint.startswith("hint: ") and "incomplete" in hint
    assert not Path("y.npy").exists()
    assert json.loads(Path("kept/manifest.json").read_text())["complete"] is False
    assert not Path("kept/record.json").exists()
    last_row = int(error.split("rows 0-")[1].split(" ")[0])
    rows = np.memmap("y.npy.partial", np.float32, "r", HEADER_BYTES, (64, 2048, 128))
    for row in range(last_row + 1):  # they left a LayerNorm whose gain is one
        assert np.allclose(rows[row].std(axis=1), 1, atol=1e-2)
    judged = subprocess.run([*FRONTIER, "referee", "kept"], capture_output=True, text=True)
    assert judged.returncode == 2, judged.stderr


def test_a_run_stopped_before_its_first_row_leaves_no_part() -> None:
    done = stop_when(lambda: Path("kept/manifest.json").exists(), signal.SIGINT, "--output", "y.npy", "--resident")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("y.npy").exists()
    if "rows 0-" not in done.stderr:
        assert not Path("y.npy.partial").exists(), done.stderr


def test_stopping_while_the_run_directory_is_written_leaves_no_part() -> None:
    # Weights of 0.8 GB take a while to be made, between the output's reservation and the first row.
    wide = ("--d-model", "4096", "--ffn-dim", "4096", "--seq-len", "64", "--output", "y.npy")
    done = stop_when(lambda: Path("y.npy.partial").exists(), signal.SIGINT, *wide)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("y.npy").exists() and not Path("y.npy.partial").exists(), done.stderr


def test_stopping_after_the_output_is_whole_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "time_road", stop)
    done = try_run("--output", "y.npy", "--ceilings")
    assert done.exit_code == 130
    assert np.load("y.npy").shape == (5, 150, 64)
    assert "y.npy is whole" in done.stderr, done.stderr


def test_stopping_between_two_passes_keeps_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "time_card", stop)
    done = try_run("--output", "y.npy", "--passes", "2")
    assert_refused(done, 130, "rows 0-4 of 5 are whole in y.npy.partial")
    assert not Path("y.npy").exists()


def test_a_part_that_is_left_is_replaced_only_when_allowed() -> None:
    Path("y.npy.partial").write_bytes(b"rows of an earlier run")
    assert_refused(try_run("--output", "y.npy"), 2, "y.npy.partial is left from an interrupted run", "--overwrite")
    assert Path("y.npy.partial").read_bytes() == b"rows of an earlier run"
    run("--output", "y.npy", "--overwrite")
    assert os.path.exists("y.npy") and not os.path.exists("y.npy.partial")
