"""The command line: three exit codes, data on stdout, talk on stderr, and a verdict in the run directory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import referee
from referee import verdict as verdict_room
from referee.cli import cli, parse_bytes
from referee.prove import Run
from referee.verdict import choose_positions


@pytest.fixture
def spoilt_dir(tmp_path: Path, tiny_run: Run, tiny_output: np.ndarray) -> Path:
    output = tiny_output.copy()
    output[1, 20, 3] += 1
    tiny_run.write(tmp_path / "spoilt", output)
    return tmp_path / "spoilt"


def test_a_faithful_run_passes_with_exit_0(check: Callable, run_dir: Path) -> None:
    result = check()
    assert result.exit_code == 0
    assert "pass   0 of 1,280 fail, 0 nonfinite; worst 0." in result.stdout
    assert "rule       |u-r| < 0.002 or < 0.02 |r|\n" in result.stdout
    assert "2 x 40 positions of case tiny in float64" in result.stderr  # the estimate
    written = json.loads((run_dir / "verdict.json").read_text())
    assert written["verdict"] == "pass"
    assert [row["row"] for row in written["rows"]] == [0, 1]
    assert written["positions"] == {"judged": 40, "of": 40, "draw_seed": None}
    assert written["threads"] == 2
    assert written["versions"]["torch"] == torch.__version__
    assert written["command"].startswith("referee ")
    assert written["wall_s"] > 0
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


def test_a_spoilt_element_fails_with_exit_1_and_its_place(spoilt_dir: Path) -> None:
    result = CliRunner().invoke(cli, ["check", str(spoilt_dir), "--json", "--quiet"])
    assert result.exit_code == 1
    assert result.stderr == ""
    shown = json.loads(result.stdout)
    assert shown == json.loads((spoilt_dir / "verdict.json").read_text())
    assert (shown["verdict"], shown["total"]["failing"]) == ("fail", 1)
    worst = shown["total"]["worst"]
    assert (worst["row"], worst["position"], worst["channel"]) == (1, 20, 3)
    assert worst["output"] - worst["reference"] == pytest.approx(1, abs=0.01)
    assert "row 1 position 20 channel 3" in CliRunner().invoke(cli, ["check", str(spoilt_dir)]).stdout


def test_rows_and_positions_limit_what_is_judged(spoilt_dir: Path) -> None:
    def run(*options: str) -> tuple[int, dict]:
        result = CliRunner().invoke(cli, ["check", str(spoilt_dir), "--json", *options])
        return result.exit_code, json.loads(result.stdout)

    assert run("--rows", "0")[0] == 0
    assert run("--rows", "0,1")[0] == 1
    few = run("--positions", "10")
    assert few[0] == 0  # position 20 is in neither end
    assert few[1]["positions"] == {"judged": 10, "of": 40, "draw_seed": 0}
    assert few[1]["total"]["elements"] == 2 * 10 * 16
    assert run("--positions", "all")[0] == 1
    assert 20 not in choose_positions(10, 40).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "7"], "row 7 was not watched by the run"),
        (["--memory", "1KiB"], "the scores of 2 threads need 2,048 bytes at least, the bound is 1,024"),
    ],
)
def test_an_impossible_wish_is_refused(options: list[str], said: str, refused: Callable[..., str]) -> None:
    assert refused(*options) == said


@pytest.mark.parametrize(
    "options", [["--rows", "a"], ["--positions", "0"], ["--positions", "x"], ["--memory", "2 GiBi"], ["--threads", "0"]]
)
def test_a_malformed_option_is_exit_2(options: list[str], check: Callable) -> None:
    assert check(*options).exit_code == 2


def test_the_function_refuses_in_words_too(run_dir: Path) -> None:
    with pytest.raises(referee.CannotJudge, match="0 positions") as caught:
        referee.judge(run_dir, positions=0)
    assert (caught.value.exit_code, caught.value.hint) == (2, "give 1 or more, or all")


def test_a_fault_of_the_referee_itself_is_never_exit_1(check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise RuntimeError("stumbled")

    monkeypatch.setattr(verdict_room, "recompute", stumble)
    result = check("--quiet")
    assert result.exit_code == 2
    assert "error: no verdict: stumbled\nhint: " in result.stderr


def test_a_row_beyond_the_memory_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_room, "ROW_BYTES", 1 << 40)
    assert refused().startswith("a row in float64 needs 655,360.00 GiB, ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_access_is_refused(run_dir: Path, refused: Callable[..., str]) -> None:
    run_dir.chmod(0o500)
    assert refused().startswith("cannot write a verdict")


def test_a_link_in_place_of_the_verdict_is_not_followed(run_dir: Path, tmp_path: Path, check: Callable) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("keep me")
    (run_dir / "verdict.json").symlink_to(treasure)
    (run_dir / f".verdict.json.{os.getpid()}.partial").symlink_to(treasure)
    assert check().exit_code == 0
    assert treasure.read_text() == "keep me"
    assert not (run_dir / "verdict.json").is_symlink()


def test_bytes_are_read_as_people_write_them() -> None:
    wanted = {"2GiB": 2 << 30, "1.5 MiB": 3 << 19, "100": 100, "3gb": 3 * 10**9}
    assert {text: parse_bytes(text) for text in wanted} == wanted


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["prove", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from click.testing import CliRunner; from referee.cli import cli;"
        f"print(CliRunner().invoke(cli, {arguments!r}).output); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage:" in done.stdout


def test_the_module_runs_as_a_program(run_dir: Path) -> None:
    command = [sys.executable, "-m", "referee", "check", str(run_dir), "--rows", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("row 1      pass   0 of 640 fail")
    assert json.loads((run_dir / "verdict.json").read_text())["command"] == f"referee check {run_dir} --rows 1"
