"""Raw float32 from standard input and to standard output gives the same bytes as files, once, and is refused twice."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import assert_refused, flags, output_of, try_run

FRONTIER = [sys.executable, "-c", "from frontier.cli import cli; cli()"]
RECIPE = ("--recipe", "fp32/packed/dense")


def piped(rows: bytes | None, *words: str, **sizes: Any) -> subprocess.CompletedProcess[bytes]:
    command = [*FRONTIER, "run", "--device", "cpu", *flags(**sizes), "--run-dir", "kept", *RECIPE, *words]
    return subprocess.run(command, input=rows, capture_output=True, timeout=60)


@pytest.fixture(name="rows_BSD")
def input_rows() -> np.ndarray:
    x_BSD = np.random.default_rng(3).standard_normal((5, 150, 64)).astype(np.float32)
    np.save("x.npy", x_BSD)
    return x_BSD


@pytest.mark.parametrize(
    "words", [("--quiet",), ("--resident", "--passes", "2"), ("--flow", "chunked", "--chunk", "64")]
)
def test_pipes_carry_the_bytes_that_files_would(rows_BSD: np.ndarray, words: tuple[str, ...]) -> None:
    several = "--passes" in words
    done = piped(rows_BSD.tobytes(), "--input", "-", "--output", "y.npy" if several else "-", *words)
    assert done.returncode == 0, done.stderr
    wanted = output_of("--input", "x.npy", *RECIPE, *(words if "--flow" in words else ()), name="wanted")
    got = Path("y.npy").read_bytes()[128:] if several else done.stdout
    assert np.allclose(np.frombuffer(got, np.float32), wanted.ravel(), rtol=1e-5, atol=1e-6)
    assert len(got) == wanted.nbytes
    if not several:
        assert b"run dir   kept" in done.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:-1], "standard input ended in row 4: 5 rows, 192,000 bytes, expected"),
        (lambda rows: rows[:100], "standard input ended in row 0"),
        (lambda rows: rows + b"x", "standard input goes on behind its 192,000 bytes"),
        (lambda rows: b"", "standard input ended in row 0"),
    ],
)
def test_an_input_that_is_not_of_the_case_is_refused(rows_BSD: np.ndarray, change: Any, told: str) -> None:
    done = piped(change(rows_BSD.tobytes()), "--input", "-", "--output", "none", "--quiet")
    assert done.returncode == 2 and told in done.stderr.decode(), done.stderr
    assert '"complete": true' not in Path("kept/manifest.json").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("--input", "-", "--output", "y.npy", "--passes", "2"),
        ("--input", "-", "--output", "y.npy", "--ceilings"),
        ("--input", "-", "--output", "y.npy", "--resume"),
        ("--output", "-", "--passes", "2"),
        ("--output", "-", "--resume"),
        ("--input", "-", "--resident", "--output", "y.npy", "--resume"),
        ("--input", "-", "--output", "y.npy", "--no-causal", "--chunk", "64"),
    ],
)
def test_what_needs_a_pipe_twice_is_refused(words: tuple[str, ...]) -> None:
    assert_refused(try_run(*words), 2, "a pipe passes each row once")


def test_a_number_that_is_not_finite_is_told_without_its_place(rows_BSD: np.ndarray) -> None:
    rows_BSD[3, 7, 1] = np.nan
    done = piped(rows_BSD.tobytes(), "--input", "-", "--output", "-", "--quiet")
    assert done.returncode == 4 and b"the input is not finite in rows 0-4, which a pipe" in done.stderr
    assert done.stdout == b""


def test_a_reader_that_goes_away_ends_the_run() -> None:
    command = [*FRONTIER, "run", "--device", "cpu", *flags(batch_size=200), *RECIPE, "--output", "-", "--quiet"]
    child = subprocess.Popen([*command, "--run-dir", "kept"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert len(child.stdout.read(1000)) == 1000
    child.stdout.close()
    assert child.wait(timeout=30) == 2
    assert b"standard output cannot be written" in child.stderr.read()
    child.stderr.close()


@pytest.mark.parametrize("waits_for", ["input", "output"])
def test_a_run_that_waits_for_a_pipe_can_be_stopped(waits_for: str) -> None:
    words = ("--input", "-", "--output", "none") if waits_for == "input" else ("--output", "-")
    command = [*FRONTIER, "run", "--device", "cpu", *flags(batch_size=200), *RECIPE, *words, "--quiet"]
    pipe = subprocess.PIPE
    child = subprocess.Popen([*command, "--run-dir", "kept"], stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        until_s = time.monotonic() + 30
        while not os.path.exists("kept/weights.safetensors") and time.monotonic() < until_s:
            time.sleep(0.02)
        time.sleep(0.5)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=10) == 130
        assert child.stderr is not None and b"stopped by request" in child.stderr.read()
    finally:
        child.kill()
        for end in (child.stdin, child.stdout, child.stderr):
            assert end is not None
            end.close()
