"""Small runs on disk, faithful until a test spoils them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from referee.case import Case
from referee.cli import cli
from referee.inputs import seeded_weights
from referee.prove import Run, Wrong

TINY = Case(
    name="tiny", batch_size=2, seq_len=40, d_model=16, heads=2, ffn_dim=24, layers=1, causal=True, seed=5,
    input_scale=1.0, atol=2e-3, rtol=2e-2,
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run() -> Run:
    return Run(case=TINY, weights=seeded_weights(TINY))


@pytest.fixture(scope="session")
def tiny_output(tiny_run: Run) -> np.ndarray[Any, Any]:
    return tiny_run.outputs(Wrong())


@pytest.fixture
def run_dir(tmp_path: Path, tiny_run: Run, tiny_output: np.ndarray[Any, Any]) -> Path:
    """A faithful run of the tiny case."""
    tiny_run.write(tmp_path / "run", tiny_output.copy())
    return tmp_path / "run"


@pytest.fixture
def edit(run_dir: Path) -> Callable[[Callable[[dict[str, Any]], object]], None]:
    """Change the manifest of `run_dir` in place."""

    def change(mutate: Callable[[dict[str, Any]], object]) -> None:
        path = run_dir / "manifest.json"
        manifest = json.loads(path.read_text())
        mutate(manifest)
        path.write_text(json.dumps(manifest))

    return change


@pytest.fixture
def check(run_dir: Path) -> Callable[..., Result]:
    """`referee check` on `run_dir`, in this process."""

    def invoke(*options: str) -> Result:
        return CliRunner().invoke(cli, ["check", str(run_dir), "--threads", "2", *options])

    return invoke


@pytest.fixture
def refused(check: Callable[..., Result], run_dir: Path) -> Callable[..., str]:
    """The one sentence of a refusal; exit code, hint, and the absence of a verdict are asserted here."""

    def invoke(*options: str) -> str:
        result = check("--quiet", *options)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        error, hint = result.stderr.splitlines()
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        assert len(hint) > 10
        return error.removeprefix("error: ")

    return invoke
