"""A row too long to be kept whole is judged at the positions that its run kept, and nowhere else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from referee.crew import Crew
from referee.inputs import hash_row

RANGES = [[0, 3], [10, 21], [39, 40]]
KEPT = [0, 1, 2, *range(10, 21), 39]
OUTPUT = "watched/row_00000001.npy"


@pytest.fixture
def keep(run_dir: Path, edit: Callable) -> Callable[..., None]:
    """Leave of row 1 what stands at KEPT, after `spoil` had its way with it."""
    whole_SD = np.load(run_dir / OUTPUT)

    def write(ranges: Any = RANGES, spoil: Callable[[np.ndarray], object] = lambda kept_PD: None) -> None:
        kept_PD = whole_SD[KEPT]
        spoil(kept_PD)
        np.save(run_dir / OUTPUT, kept_PD)
        with Crew(1) as crew:
            changed = {"positions": ranges, "output_sha256": hash_row(kept_PD, crew)}
        edit(lambda manifest: manifest["watched"][1].update(changed))

    return write


def test_kept_positions_pass_and_the_verdict_says_how_many(check: Callable[..., Result], keep: Callable) -> None:
    keep()
    result = check("--rows", "1")
    assert result.exit_code == 0
    assert "positions  15 of 40 in a row were judged\n" in result.stdout
    verdict = json.loads(check("--json", "--quiet").stdout)
    assert verdict["positions"] == {"judged": 15, "of": 40, "draw_seed": None}
    assert [row["elements"] for row in verdict["rows"]] == [40 * 16, 15 * 16]


def test_a_whole_row_says_nothing_of_positions(check: Callable[..., Result]) -> None:
    assert "positions " not in check().stdout


@pytest.mark.parametrize(("place", "position"), [(0, 0), (3, 10), (13, 20), (14, 39)])
def test_a_spoilt_element_is_named_by_its_position_in_the_row(
    place: int, position: int, check: Callable[..., Result], keep: Callable
) -> None:
    def spoil(kept_PD: np.ndarray) -> None:
        kept_PD[place, 5] += 1

    keep(spoil=spoil)
    result = check("--json", "--quiet")
    worst = json.loads(result.stdout)["total"]["worst"]
    assert (result.exit_code, worst["row"], worst["position"], worst["channel"]) == (1, 1, position, 5)


@pytest.mark.parametrize("ranges", [[[0, 3], [11, 22], [39, 40]], [[0, 3], [10, 20], [38, 40]]])
def test_positions_that_are_not_those_kept_fail(ranges: Any, check: Callable[..., Result], keep: Callable) -> None:
    keep(ranges)
    assert check("--quiet").exit_code == 1


def test_a_wish_for_fewer_positions_draws_among_those_kept(check: Callable[..., Result], keep: Callable) -> None:
    def spoil(kept_PD: np.ndarray) -> None:
        kept_PD[7] += 1

    keep(spoil=spoil)  # neither of the first nor of the last two
    verdict = json.loads(check("--rows", "1", "--positions", "4", "--json", "--quiet").stdout)
    assert verdict["verdict"] == "pass"
    assert verdict["positions"] == {"judged": 4, "of": 40, "draw_seed": 0}
    assert check("--rows", "1", "--positions", "15").exit_code == 1


@pytest.mark.parametrize(
    "ranges",
    [
        *([], {}, "all", 15, [15], [[0]], [[0, 1, 2]], [[0, 15.0]], [[False, 15]], [["0", "15"]], [None]),
        *([[-1, 14]], [[26, 41]], [[5, 5]], [[15, 0]], [[0, 10], [9, 14]], [[10, 20], [0, 5]], [[0, 2**70]]),
    ],
    ids=str,
)
def test_ranges_that_are_none_are_refused(ranges: Any, keep: Callable, refused: Callable[..., str]) -> None:
    keep(ranges)
    assert refused().startswith("manifest.json: watched[1]: `positions` must be ascending ranges [start, stop] within ")


@pytest.mark.parametrize("ranges", [[[0, 14]], [[0, 16]], None])
def test_a_file_of_another_length_than_its_ranges_is_refused(
    ranges: Any, keep: Callable, refused: Callable[..., str]
) -> None:
    keep(ranges)
    assert refused().startswith("row_00000001.npy is no whole npy file: found <f4[15, 16], expected <f4[")
