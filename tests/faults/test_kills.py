"""A run that is killed, wherever it is, goes on with --resume and ends in the bytes of a run that nobody disturbed."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from killing import GO_ON, KILLED, clear, go_on_to_the_end, kept_bytes
from nursery import Nursery

KILLS = 60


def test_a_run_killed_at_random_moments_ends_in_the_same_bytes(
    nursery: Nursery, folder: Path, undisturbed: dict[str, bytes]
) -> None:
    seed = time.time_ns()
    draw = random.Random(seed)
    usual_s = 1.0
    for _ in range(3):  # the shortest: later moments come when all is done
        usual_s = min(usual_s, nursery.run(folder, *GO_ON)["took_s"])
        clear(folder)
    kills = ends = 0
    while kills < KILLS:
        ended = nursery.run(folder, *GO_ON, signal_after_s=draw.uniform(0, 1.1 * usual_s))
        assert ended["ending"] in (KILLED, 0), (seed, ended)
        kills += ended["ending"] == KILLED
        if ended["ending"] == 0 or kills % 4 == 3:  # else the resumed run is killed too
            assert go_on_to_the_end(nursery, folder) == undisturbed, f"seed {seed}, kill {kills}"
            ends += 1
            clear(folder)
    assert ends > KILLS // 8


def test_a_run_killed_at_any_step_that_changes_the_disk_ends_in_the_same_bytes(
    nursery: Nursery, folder: Path, undisturbed: dict[str, bytes]
) -> None:
    resumed = 0
    for step in range(1, 1000):
        ended = nursery.run(folder, *GO_ON, kill_at=step)
        if ended["ending"] == 0:
            break
        assert ended["ending"] == KILLED, (step, ended)
        assert not (folder / "y.npy").exists() or (folder / "y.npy").read_bytes() == undisturbed["y.npy"]
        assert go_on_to_the_end(nursery, folder) == undisturbed, f"step {step}"
        resumed += "resumed" in (folder / "kept" / "record.json").read_text()
        clear(folder)
    assert step > 50, "hardly a step was counted"
    assert resumed > 10, "hardly a run was gone on with: all began anew"


def test_a_run_of_chunks_goes_on_with_its_next_row(nursery: Nursery, folder: Path) -> None:
    words = (*GO_ON, "--flow", "chunked", "--chunk", "24")
    assert nursery.run(folder, *words)["ending"] == 0
    wanted = kept_bytes(folder)
    clear(folder)
    done_rows: set[int] = set()
    for step in range(31, 120, 11):
        ended = nursery.run(folder, *words, kill_at=step)
        assert ended["ending"] in (KILLED, 0), (step, ended)
        assert go_on_to_the_end(nursery, folder, *words[len(GO_ON) :]) == wanted, f"step {step}"
        record = json.loads((folder / "kept" / "record.json").read_text())
        done_rows.add(record["notes"].get("resumed", {"done_rows": 0})["done_rows"])
        clear(folder)
    assert len(done_rows) > 3, done_rows


def test_a_journal_that_claims_a_row_before_it_is_written_would_be_seen(
    nursery: Nursery, folder: Path, undisturbed: dict[str, bytes]
) -> None:
    for step in range(30, 90, 2):
        assert nursery.run(folder, *GO_ON, kill_at=step, plant="claims first")["ending"] == KILLED
        if nursery.run(folder, *GO_ON)["ending"] != 0 or kept_bytes(folder) != undisturbed:
            return
        clear(folder)
    pytest.fail("the planted fault was not seen")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_goes_on_to_the_same_bytes(
    nursery: Nursery, folder: Path, undisturbed: dict[str, bytes], number: signal.Signals
) -> None:
    stopped = 0
    for turn in range(10):
        ended = nursery.run(folder, *GO_ON, signal_after_s=0.01 + 0.006 * turn, signal=number)
        assert ended["ending"] in (130, 0, -number), ended  # the last: before our handler stood
        assert "Traceback" not in ended["stderr"] or ended["ending"] != 130
        stopped += ended["ending"] == 130
        assert go_on_to_the_end(nursery, folder) == undisturbed
        clear(folder)
    assert stopped


def test_what_was_finished_before_a_stop_is_not_made_again(nursery: Nursery, folder: Path) -> None:
    for step in range(40, 160, 6):
        ended = nursery.run(folder, *GO_ON, kill_at=step, signal=signal.SIGTERM)
        if "are whole in y.npy.partial" in ended["stderr"]:
            break
        clear(folder)
    told = ended["stderr"].split(" of 12 are whole")[0].rpartition("rows ")[2]  # such as `0-4, 6`: writers overtake
    spans = [(int(first), int(last or first)) for first, _, last in (span.partition("-") for span in told.split(", "))]
    whole = sum(last - first + 1 for first, last in spans)
    assert "--run-dir kept --resume" in ended["stderr"]
    go_on_to_the_end(nursery, folder)
    record = json.loads((folder / "kept" / "record.json").read_text())
    assert record["kind"] == "resumed"
    assert record["notes"]["resumed"] == {"done_rows": whole, "drifted": []}
    assert record["flops"] > 0 or whole == 12


def test_a_run_that_is_complete_has_nothing_left_to_do(
    nursery: Nursery, folder: Path, undisturbed: dict[str, bytes]
) -> None:
    go_on_to_the_end(nursery, folder)
    before = (folder / "kept" / "record.json").read_bytes()
    ended = nursery.run(folder, *GO_ON)
    assert ended["ending"] == 0 and "is complete: nothing is left to do" in ended["stderr"]
    assert kept_bytes(folder) == undisturbed and (folder / "kept" / "record.json").read_bytes() == before
