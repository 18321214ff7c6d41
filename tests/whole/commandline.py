"""The command line from the outside: what a user types, and what comes back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

from frontier.case import Case
from frontier.cli import cli

SIZES = {"batch_size": 5, "seq_len": 150, "d_model": 64, "heads": 4, "ffn_dim": 48, "layers": 2}


def flags(**changes: Any) -> list[str]:
    """The small case as flags of any command."""
    return [word for key, value in (SIZES | changes).items() for word in (f"--{key.replace('_', '-')}", str(value))]


def small_case(**changes: Any) -> Case:
    """What `flags` makes of case 14."""
    return Case.load("14").override(**(SIZES | changes))


def frontier(*words: Any) -> Result:
    """`frontier WORDS`; whatever is not meant for users is raised here."""
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="frontier", catch_exceptions=False)


def run(*words: Any, run_dir: Path | str = "kept", **sizes: Any) -> Result:
    """`frontier run` of the small case on the CPU, which must succeed."""
    done = try_run(*words, run_dir=run_dir, **sizes)
    assert done.exit_code == 0, done.output
    return done


def try_run(*words: Any, run_dir: Path | str = "kept", **sizes: Any) -> Result:
    """The same, whatever comes of it."""
    return frontier("run", "--device", "cpu", *flags(**sizes), "--run-dir", run_dir, *words)


def output_of(*words: Any, name: str, **sizes: Any) -> np.ndarray:
    """The bytes that a run of its own writes to `name.npy`."""
    run("--output", f"{name}.npy", *words, run_dir=f"{name}-kept", **sizes)
    return np.load(f"{name}.npy")


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes()


def manifest_of(run_dir: Path | str = "kept") -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((Path(run_dir) / "manifest.json").read_text())
    return manifest


def is_complete(run_dir: Path | str = "kept") -> bool:
    return (Path(run_dir) / "manifest.json").exists() and manifest_of(run_dir)["complete"]


def judge(run_dir: Path | str = "kept", *words: str) -> Result:
    """`frontier referee RUN_DIR`."""
    return frontier("referee", str(run_dir), *words)


def assert_refused(done: Result, exit_code: int, *says: str) -> None:
    """One error line, one hint line, nothing on stdout; `says` stands in one of the two."""
    assert done.exit_code == exit_code, done.output
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], done.stderr
    assert done.stderr.splitlines()[-2:] == lines, "error and hint come last, each on one line"
    for word in says:
        assert word in "\n".join(lines), done.stderr


def assert_nothing_left(run_dir: Path | str = "kept", outputs: Sequence[Path | str] = ("y.npy",)) -> None:
    """Neither an output, nor a part of one, nor a run that claims to be whole."""
    for output in outputs:
        assert not Path(output).exists(), f"{output} is left"
        assert not Path(f"{output}.partial").exists(), f"{output}.partial is left"
    assert not is_complete(run_dir)
