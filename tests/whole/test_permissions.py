"""Files and folders that the user may not read or write: an error in words, whoever runs the tests."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commandline import assert_refused, frontier, is_complete, run, try_run

NOBODY = 65534


@pytest.fixture
def as_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file rights of an ordinary user, for this thread; root's ignore every permission."""
    run(run_dir="warm-up")  # all modules are imported by now
    place = Path(tempfile.mkdtemp())
    monkeypatch.chdir(place)
    for name in ("closed/within", "readable"):
        (place / name).mkdir(parents=True)
    np.save("closed/within/x.npy", np.zeros((5, 150, 64), np.float32))
    Path("closed/within/w.safetensors").write_bytes(b"")
    Path("closed/within/mine.toml").write_text("")
    Path("secret.npy").write_bytes(b"")
    Path("secret.npy").chmod(0o600)
    Path("readable").chmod(0o755)
    Path("closed").chmod(0o700)
    place.chmod(0o777)
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsuid(NOBODY)
    yield
    if os.geteuid() == 0:
        libc.setfsuid(0)
    shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="closed folders are made by root")
@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize(
    "words",
    [
        ["--output", "readable/y.npy"],
        ["--output", "closed/y.npy"],
        ["--output", "closed/within/y.npy"],
        ["--run-dir", "readable/kept"],
        ["--run-dir", "closed/within/kept"],
        ["--run-dir", "readable"],
        ["--trace", "readable/t.json"],
        ["--trace", "closed/within/t.json"],
        ["--input", "secret.npy", "--output", "none"],
        ["--input", "closed/within/x.npy", "--output", "none"],
        ["--mask", "closed/within/x.npy"],
        ["--weights", "closed/within/w.safetensors"],
    ],
    ids=" ".join,
)
def test_what_may_not_be_read_or_written_is_named(words: list[str]) -> None:
    done = try_run("--output", "y.npy", *words)
    assert done.exit_code in (2, 3)
    assert_refused(done, done.exit_code, words[1].split("/")[0])
    assert not Path("y.npy").exists() and not Path("y.npy.partial").exists() and not is_complete()


@pytest.mark.skipif(os.geteuid() != 0, reason="closed folders are made by root")
@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize("command", ["cases", "plan"])
def test_a_case_that_may_not_be_read_is_named(command: str) -> None:
    words = ["closed/within/mine.toml"] if command == "cases" else ["--case", "closed/within/mine.toml"]
    assert_refused(frontier(command, "--device", "cpu", *words), 2, "closed/within/mine.toml")
