"""What a user is handed is what was judged: the referee looks into the output file that a run wrote."""

import json
import os
from pathlib import Path

import pytest
from commandline import judge, manifest_of, run

NAMES = ["y.npy", "y.safetensors"]
ROW_BYTES = 150 * 64 * 4


def told_of_the_output() -> str:
    verdict: dict[str, str] = json.loads(Path("kept/verdict.json").read_text())
    return verdict["output"]


def flip_a_bit(name: str, row: int) -> None:
    place = Path(name).stat().st_size - ROW_BYTES * (5 - row)
    with open(name, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("words", [(), ("--chunk", "40"), ("--passes", "2")], ids=" ".join)
@pytest.mark.parametrize("name", NAMES)
def test_an_altered_output_cannot_be_judged_and_the_right_one_passes(name: str, words: tuple[str, ...]) -> None:
    run("--output", name, "--watch", "0,3", *words)
    assert manifest_of()["output"] == os.path.realpath(name)
    assert judge().exit_code == 0 and told_of_the_output() == "compared"
    flip_a_bit(name, 3)
    done = judge()
    assert done.exit_code == 2 and not Path("kept/verdict.json").exists()
    assert f"error: row 3 of {name} is not what the run kept of it, first at position 0 channel 0" in done.stderr
    assert done.stdout == "" and "hint: " in done.stderr
    flip_a_bit(name, 3)
    assert judge().exit_code == 0


def test_a_row_that_was_not_watched_is_for_resume_to_look_at() -> None:
    run("--output", "y.npy")
    flip_a_bit("y.npy", 2)
    assert judge().exit_code == 0 and told_of_the_output() == "compared"


def test_an_output_that_moved_is_told_as_missing() -> None:
    run("--output", "y.npy")
    os.rename("y.npy", "elsewhere.npy")
    done = judge()
    assert done.exit_code == 0 and told_of_the_output() == "missing"
    assert f"the run's output {os.path.realpath('y.npy')} is not there" in done.stderr


def test_the_output_is_found_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--output", "y.npy")
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    assert judge("../kept").exit_code == 0
    assert json.loads((folder / "kept/verdict.json").read_text())["output"] == "compared"


@pytest.mark.parametrize("output", ["none", "memory"])
def test_a_run_that_kept_no_file_has_none(output: str) -> None:
    run("--output", output)
    assert judge().exit_code == 0 and told_of_the_output() == "none"


def test_an_output_that_another_run_wrote_over_is_seen() -> None:
    run("--output", "y.npy")
    run("--output", "y.npy", "--overwrite", "--seed", "7", run_dir="other")
    assert judge("other").exit_code == 0
    done = judge()
    assert done.exit_code == 2 and "row 0 of y.npy is not what the run kept of it" in done.stderr
