"""An output file that is not, bit by bit, what was kept of it cannot be judged; one that is gone is said to be."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import Result

from referee import delivered
from referee.crew import Crew
from referee.inputs import hash_row

Hand = Callable[..., Path]
SUFFIXES = ["npy", "safetensors"]


def save(path: Path, y_BSD: np.ndarray[Any, Any]) -> None:
    if path.suffix == ".npy":
        np.save(path, y_BSD)
    else:
        safetensors.numpy.save_file({"y": y_BSD}, path)


@pytest.fixture
def hand_over(tmp_path: Path, tiny_output: np.ndarray, edit: Callable) -> Hand:
    """Write the output beside the run, after `spoil` had its way with it, and name it in the manifest."""

    def write(suffix: str, spoil: Callable[[np.ndarray], object] = lambda y_BSD: None) -> Path:
        y_BSD, path = tiny_output.copy(), tmp_path / f"y.{suffix}"
        spoil(y_BSD)
        save(path, y_BSD)
        edit(lambda manifest: manifest.update(output=str(path)))
        return path

    return write


def flip(place: tuple[int, int, int], bit: int = 0) -> Callable[[np.ndarray], object]:
    def spoil(y_BSD: np.ndarray) -> None:
        y_BSD.view("<u4")[place] ^= 1 << bit

    return spoil


def verdict_of(run_dir: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((run_dir / "verdict.json").read_text())
    return verdict


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_faithful_output_file_is_compared(suffix: str, hand_over: Hand, check: Callable, run_dir: Path) -> None:
    hand_over(suffix)
    assert check().exit_code == 0
    assert verdict_of(run_dir)["output"] == "compared"


@pytest.mark.parametrize("told", ["none", "memory", "-", "y.npy", "/y.bin", None, 7, ["/y.npy"]], ids=str)
def test_a_run_without_an_output_file_is_judged_by_its_rows(
    told: object, edit: Callable, check: Callable, run_dir: Path
) -> None:
    edit(lambda manifest: manifest.update(output=told))
    assert check().exit_code == 0
    assert verdict_of(run_dir)["output"] == "none"


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 39, 15), (1, 20, 3), (1, 39, 15)])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_bit_that_no_tolerance_would_see_is_refused_by_its_place(
    suffix: str, place: tuple[int, int, int], hand_over: Hand, refused: Callable, tiny_output: np.ndarray
) -> None:
    row, position, channel = place
    hand_over(suffix, flip(place))
    said = refused()
    assert said.startswith(f"row {row} of y.{suffix} is not what the run kept of it, first at ")
    assert f" first at position {position} channel {channel}: the file holds " in said
    assert f"the run kept {tiny_output[place]:.9g} (bits {tiny_output.view('<u4')[place]:08x})" in said


def test_the_sign_of_a_zero_counts(hand_over: Hand, run_dir: Path, edit: Callable, refused: Callable) -> None:
    row_SD = np.load(run_dir / "watched/row_00000000.npy")
    row_SD[5, 5] = 0.0
    np.save(run_dir / "watched/row_00000000.npy", row_SD)
    with Crew(1) as crew:
        sha256 = hash_row(row_SD, crew)
    edit(lambda manifest: manifest["watched"][0].update(output_sha256=sha256))

    def spoil(y_BSD: np.ndarray) -> None:
        y_BSD[0, 5, 5] = -0.0

    hand_over("npy", spoil)
    assert "position 5 channel 5: the file holds -0 (bits 80000000), the run kept 0 (bits 00000000)" in refused()


@pytest.mark.parametrize("piece", [1, 7, 40])
def test_every_piece_of_a_row_is_looked_at(
    piece: int, hand_over: Hand, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivered, "PIECE_POSITIONS", piece)
    for position in (0, 6, 7, 27, 39):
        hand_over("safetensors", flip((1, position, 2), 31))
        assert f"row 1 of y.safetensors is not what the run kept of it, first at position {position} " in refused()


def test_only_the_rows_to_judge_need_to_agree(hand_over: Hand, check: Callable, refused: Callable) -> None:
    hand_over("npy", flip((1, 2, 3)))
    assert check("--rows", "0").exit_code == 0
    assert "row 1 of y.npy" in refused("--rows", "0,1")


def test_positions_that_were_not_watched_are_not_known(
    hand_over: Hand, run_dir: Path, edit: Callable, check: Callable, refused: Callable
) -> None:
    row_SD = np.load(run_dir / "watched/row_00000001.npy")
    kept_PD = row_SD[[0, 1, 2, *range(10, 21)]]
    np.save(run_dir / "watched/row_00000001.npy", kept_PD)
    with Crew(1) as crew:
        changed = {"positions": [[0, 3], [10, 21]], "output_sha256": hash_row(kept_PD, crew)}
    edit(lambda manifest: manifest["watched"][1].update(changed))
    hand_over("npy", flip((1, 5, 0)))
    assert check("--quiet").exit_code == 0
    hand_over("npy", flip((1, 12, 0)))
    assert "first at position 12 channel 0" in refused()


@pytest.mark.parametrize("kind", ["gone", "a folder", "a pipe", "a dangling link"])
def test_an_output_file_that_is_gone_is_told_and_the_rows_are_judged(
    kind: str, hand_over: Hand, check: Callable[..., Result], run_dir: Path
) -> None:
    path = hand_over("npy")
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a dangling link":
        path.symlink_to("nowhere")
    result = check()
    assert result.exit_code == 0
    told = [line for line in result.stderr.splitlines() if "is not there" in line]
    assert told == [f"the run's output {path} is not there: the rows that were kept of it are judged alone"]
    assert verdict_of(run_dir)["output"] == "missing"


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def of_one_row(path: Path) -> None:
    save(path, np.zeros((1, 40, 16), "<f4"))


def in_double_precision(path: Path) -> None:
    save(path, np.zeros((2, 40, 16), "<f8"))


def in_half_precision(path: Path) -> None:
    save(path, np.zeros((2, 40, 16), "<f2"))


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize("spoil", [cut_short, emptied, of_one_row, in_double_precision, in_half_precision, pickled])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_no_output_of_the_case_is_refused(
    suffix: str, spoil: Callable[[Path], None], hand_over: Hand, refused: Callable
) -> None:
    spoil(hand_over(suffix))
    assert refused().startswith(f"y.{suffix} is no whole {suffix} file: ")


def test_a_tensor_of_another_name_is_refused(hand_over: Hand, tiny_output: np.ndarray, refused: Callable) -> None:
    safetensors.numpy.save_file({"z": tiny_output}, hand_over("safetensors"))
    assert refused() == "y.safetensors is no whole safetensors file: it holds z, expected y alone"


@pytest.mark.parametrize("told", ["/" + "x" * 300 + ".npy", "/nul\0.npy"], ids=["long", "nul"])
def test_a_path_that_no_file_can_have_is_no_crash(told: str, edit: Callable, check: Callable, run_dir: Path) -> None:
    edit(lambda manifest: manifest.update(output=told))
    result = check()
    assert "Traceback" not in result.stderr
    assert result.exit_code == 2 or verdict_of(run_dir)["output"] == "missing"


def test_without_the_comparison_an_altered_file_would_pass(
    hand_over: Hand, check: Callable, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: it is the comparison that refuses, nothing else."""
    hand_over("npy", flip((1, 20, 3), 30))
    with monkeypatch.context() as patch:
        patch.setattr(delivered, "_expect_same_bits", lambda *_: None)
        assert check().exit_code == 0
    assert "row 1 of y.npy" in refused()
