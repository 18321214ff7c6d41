"""A run killed inside a row of chunks goes on inside that row, if its spool is a file, and ends in the same bytes."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from killing import GO_ON, KILLED, clear, go_on_to_the_end, kept_bytes
from nursery import Nursery

SIZES = ("--batch-size", "2", "--seq-len", "90", "--layers", "3", "--watch", "0,1")
CHUNKS = (*SIZES, "--chunk", "16", "--spool", "file")
SPOOL = Path("kept") / "spool.bin"
NOTHING_LOST = "begins anew: none of its chunks was done"
SHAPES = {"causal": ("--causal",), "full": ("--no-causal",)}
SHAPES |= {f"{name}, masked": (*words, "--mask", "m.npy") for name, words in SHAPES.items()}


def mask(folder: Path) -> None:
    """With holes, and a chunk without a valid token in each row."""
    valid_BS = np.random.default_rng(3).random((2, 90)) < 0.6
    valid_BS[0, 32:48] = valid_BS[1, :16] = False
    np.save(folder / "m.npy", valid_BS)


def made_at(folder: Path) -> str | None:
    """Where in a row the run that made the record went on."""
    at: str | None = json.loads((folder / "kept" / "record.json").read_text())["notes"].get("resumed", {}).get("at")
    return at


@pytest.fixture(params=SHAPES)
def words(request: pytest.FixtureRequest, folder: Path) -> tuple[str, ...]:
    mask(folder)
    return (*SHAPES[request.param], *CHUNKS)


@pytest.fixture
def wanted(nursery: Nursery, folder: Path, words: tuple[str, ...]) -> dict[str, bytes]:
    """What a run leaves that nobody disturbs; the spool is gone."""
    found = go_on_to_the_end(nursery, folder, *words)
    assert not (folder / SPOOL).exists() and made_at(folder) is None
    clear(folder)
    return found


def test_killed_at_random_moments_until_it_is_done(
    nursery: Nursery, folder: Path, words: tuple[str, ...], wanted: dict[str, bytes]
) -> None:
    seed = time.time_ns()
    draw, starts, inside = random.Random(seed), 0, 0
    for _ in range(10):
        ending = KILLED
        while ending == KILLED:  # each start is killed at some step that changes the disk, until one comes to its end
            ended = nursery.run(folder, *GO_ON, *words, kill_at=draw.randint(40, 110))
            ending, starts = ended["ending"], starts + 1
            inside += "was under way and goes on with" in ended["stderr"]
            assert "anew" not in ended["stderr"].replace(NOTHING_LOST, ""), (seed, ended)
        assert ending == 0, (seed, ended)
        assert kept_bytes(folder) == wanted, seed
        assert not (folder / SPOOL).exists()
        clear(folder)
    assert starts > 10 and inside > 5, (seed, starts, inside)


def test_killed_by_the_clock_until_it_is_done(
    nursery: Nursery, folder: Path, words: tuple[str, ...], wanted: dict[str, bytes]
) -> None:
    seed = time.time_ns()
    draw, ending = random.Random(seed), KILLED
    usual_s = nursery.run(folder, *GO_ON, *words)["took_s"]
    clear(folder)
    while ending == KILLED:
        ended = nursery.run(folder, *GO_ON, *words, signal_after_s=draw.uniform(0.5, 1.0) * usual_s)
        ending = ended["ending"]
        assert "anew" not in ended["stderr"].replace(NOTHING_LOST, ""), (seed, ended)
    assert ending == 0 and kept_bytes(folder) == wanted, (seed, ended)


@pytest.mark.parametrize("shape", ["causal", "full"])
def test_a_row_that_is_claimed_before_it_is_written_would_be_seen(nursery: Nursery, folder: Path, shape: str) -> None:
    words = (*SHAPES[shape], *CHUNKS)
    wanted = go_on_to_the_end(nursery, folder, *words)
    clear(folder)
    for step in range(45, 150, 3):
        ended = nursery.run(folder, *GO_ON, *words, kill_at=step, plant="claims parts first")
        assert ended["ending"] in (KILLED, 0), ended
        ended = nursery.run(folder, *GO_ON, *words)
        if ended["ending"] != 0 or "begins anew" in ended["stderr"] or kept_bytes(folder) != wanted:
            return
        clear(folder)
    pytest.fail("the planted fault was not seen")
