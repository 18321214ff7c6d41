"""A run stopped inside a row of chunks goes on inside it; what its spool lost, or another cut, begins the row anew."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commandline import assert_refused, assert_same_bits, is_complete, judge, output_of, run, try_run
from safetensors.numpy import load_file

from frontier.flows.chunked import ChunkedRows
from frontier.record import Record

SIZES = {"batch_size": 2, "seq_len": 150, "layers": 3}
CHUNKED = ("--chunk", "40", "--spool", "file")
OUT = ("--output", "y.npy")
SPOOL = Path("kept/spool.bin")
SHAPES = ["--causal", "--no-causal"]


def stop(*words: Any, before: tuple[int, int, str, int]) -> None:
    """A run that is stopped before the write of a step: row, layer, what it does, first position."""
    write = ChunkedRows.write

    def stops(self, step, pinned_out, sink, watcher) -> None:  # type: ignore[no-untyped-def]
        if (step.row, step.layer, step.does, step.start) == before:
            raise KeyboardInterrupt
        write(self, step, pinned_out, sink, watcher)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedRows, "write", stops)
        assert try_run(*OUT, *CHUNKED, *words, **SIZES).exit_code == 130
    assert not is_complete() and Path("y.npy.partial").exists()


def record() -> Record:
    return Record.from_json(Path("kept/record.json").read_bytes())


def spoil(path: Path, place_bytes: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place_bytes)
        byte = file.read(1)
        file.seek(place_bytes)
        file.write(bytes([byte[0] ^ 1]))


MOMENTS = {
    "--causal": {
        (0, 0, "enter", 40): "row 0 layer 0 40-79 enter",
        (0, 1, "enter", 80): "row 0 layer 0 80-119 enter",
        (1, 2, "leave", 120): "row 1 layer 0 120-149 enter",
    },
    "--no-causal": {
        (0, 0, "keys", 40): "row 0 layer 0 40-79 keys",
        (0, 0, "leave", 0): "row 0 layer 0 0-39 enter",
        (0, 1, "keys", 0): "row 0 layer 1 0-39 keys",
        (0, 1, "leave", 80): "row 0 layer 1 80-119 enter",
        (0, 2, "keys", 120): "row 0 layer 2 120-149 keys",
        (1, 2, "leave", 80): "row 1 layer 2 80-119 enter",
    },
}


@pytest.mark.parametrize(
    ("shape", "before", "at"), [(shape, before, at) for shape in SHAPES for before, at in MOMENTS[shape].items()]
)
def test_a_stopped_row_goes_on_where_it_was_and_passes_the_referee(
    shape: str, before: tuple[int, int, str, int], at: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = output_of(shape, *CHUNKED, name="whole", **SIZES)
    whole_flops = Record.from_json(Path("whole-kept/record.json").read_bytes()).flops
    stop(shape, before=before)
    assert SPOOL.is_file()
    done = run(*OUT, "--resume", shape, *CHUNKED, *(("--verify",) if before[0] else ()), **SIZES)
    assert_same_bits(np.load("y.npy"), wanted)
    assert f"was under way and goes on with {at}" in caplog.text and f"gone on with at {at}" in done.stdout
    assert record().kind == "resumed"
    assert record().notes["resumed"] == {"done_rows": before[0], "drifted": [], "at": at}
    assert 0 < record().flops < whole_flops * (2 - before[0]) // 2
    assert judge().exit_code == 0
    assert not SPOOL.exists()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_stopped_again_and_again(shape: str) -> None:
    wanted = output_of(shape, *CHUNKED, name="whole", **SIZES)
    moments = list(MOMENTS[shape])
    stop(shape, before=moments[0])
    for before in moments[1:]:
        stop(shape, "--resume", before=before)
    run(*OUT, "--resume", shape, *CHUNKED, **SIZES)
    assert record().notes["resumed"]["at"] == MOMENTS[shape][moments[-1]]
    assert_same_bits(np.load("y.npy"), wanted)
    assert judge().exit_code == 0


def without_the_spool() -> None:
    SPOOL.unlink()


def with_a_shorter_spool() -> None:
    os.truncate(SPOOL, SPOOL.stat().st_size - 1)


def with_a_link() -> None:
    SPOOL.rename("elsewhere.bin")
    SPOOL.symlink_to(Path("elsewhere.bin").absolute())


def with_a_pipe() -> None:
    SPOOL.unlink()
    os.mkfifo(SPOOL)


def with_a_spoilt_spool() -> None:
    spoil(SPOOL, 1000)


def with_a_spoilt_output() -> None:
    spoil(Path("y.npy.partial"), 128 + 1000)


LOSSES: dict[Callable[[], None], str] = {
    without_the_spool: "its keys and values are not in kept/spool.bin, or not in that size",
    with_a_shorter_spool: "its keys and values are not in kept/spool.bin, or not in that size",
    with_a_link: "its keys and values are not in kept/spool.bin, or not in that size",
    with_a_pipe: "its keys and values are not in kept/spool.bin, or not in that size",
    with_a_spoilt_spool: "row 0 layer 0 0-39 enter did not write what the journal says",
    with_a_spoilt_output: "row 0 layer 2 0-39 leave did not write what the journal says",
}


@pytest.mark.parametrize("verify", [(), ("--verify",)], ids=["", "--verify"])
@pytest.mark.parametrize("lose", LOSSES)
def test_a_row_whose_spool_is_not_what_it_was_begins_anew_and_says_so(
    lose: Callable[[], None], verify: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = output_of(*CHUNKED, name="whole", **SIZES)
    stop(before=(0, 1, "enter", 120))
    before = SPOOL.read_bytes()
    lose()
    run(*OUT, "--resume", *verify, *CHUNKED, **SIZES)
    assert "row 0 was under way and begins anew: " in caplog.text and LOSSES[lose] in caplog.text
    assert_same_bits(np.load("y.npy"), wanted)
    assert record().kind == "run" and record().notes == {}
    assert not os.path.lexists(SPOOL)
    if lose is with_a_link:
        assert Path("elsewhere.bin").read_bytes() == before, "what a link leads to was written"


def test_verify_finds_what_the_sample_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    words = ("--chunk", "5", "--spool", "file", "--batch-size", "1", "--layers", "1")
    wanted = output_of(*words, name="whole", **SIZES)
    stop(*words, before=(0, 0, "enter", 145))
    kept = {path: path.read_bytes() for path in (SPOOL, Path("y.npy.partial"), *Path("kept").glob("*.json*"))}
    at_bytes = 40 * 2 * 64 * 4  # the keys of positions 40-44: the 17th of 58 writes, of which the sample has each third
    spoil(SPOOL, at_bytes)
    run(*OUT, "--resume", *words, **SIZES)
    assert "goes on with row 0 layer 0 145-149 enter" in caplog.text
    os.unlink("y.npy")
    for path, held in kept.items():  # all as it was, to be looked at once more
        path.write_bytes(held)
    spoil(SPOOL, at_bytes)
    run(*OUT, "--resume", "--verify", *words, **SIZES)
    assert "begins anew: row 0 layer 0 40-44 enter did not write what the journal says" in caplog.text
    assert_same_bits(np.load("y.npy"), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lost", ["the last", "another"])
def test_a_journal_with_a_damaged_line_goes_on_before_it_or_begins_anew(
    shape: str, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = output_of(shape, *CHUNKED, name="whole", **SIZES)
    stop(shape, before=(0, 2, "leave", 80) if shape == "--no-causal" else (0, 0, "enter", 120))
    lines = Path("kept/journal.jsonl").read_bytes().splitlines(keepends=True)
    place = len(lines) - (1 if lost == "the last" else 2)
    lines[place] = b"x" + lines[place]
    Path("kept/journal.jsonl").write_bytes(b"".join(lines))
    run(*OUT, "--resume", shape, *CHUNKED, **SIZES)
    assert f"is damaged in line {place + 1}" in caplog.text
    anew = "begins anew: the journal leaves out some of what was written" in caplog.text
    assert anew is (lost == "another")
    assert_same_bits(np.load("y.npy"), wanted)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--chunk", "30", "--spool", "file"), "the cut is another than before"),
        (("--chunk", "40", "--spool", "host"), "its keys and values do not wait in a file that is kept"),
        (("--spool", "card", "--chunk", "40"), "its keys and values do not wait in a file that is kept"),
        (("--flow", "whole"), "its keys and values do not wait in a file that is kept"),
        ((*CHUNKED, "--allow-nonfinite"), "its keys and values do not wait in a file that is kept"),
    ],
)
def test_a_row_that_is_cut_or_kept_otherwise_begins_anew(
    words: tuple[str, ...], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = output_of(*words, name="whole", **SIZES)
    stop(before=(1, 1, "enter", 80))
    run(*OUT, "--resume", *words, **SIZES)
    assert f"row 1 was under way and begins anew: {says}" in caplog.text
    assert np.abs(np.load("y.npy") - wanted).max() < 1e-5
    assert judge().exit_code == 0
    assert not SPOOL.exists()


def test_another_run_is_refused_and_the_spool_stays() -> None:
    stop(before=(0, 1, "enter", 80))
    held = SPOOL.read_bytes()
    done = try_run(*OUT, *CHUNKED, "--resume", "--seed", "9", **SIZES)
    assert_refused(done, 2, "cannot be gone on with", "case (seed)")
    assert SPOOL.read_bytes() == held
    run(*OUT, *CHUNKED, "--overwrite", "--seed", "9", **SIZES)
    assert judge().exit_code == 0


def test_a_row_that_is_not_finite_leaves_no_spool() -> None:
    x_BSD = np.random.default_rng(1).standard_normal((2, 150, 64)).astype(np.float32)
    x_BSD[0, 100] = np.nan
    np.save("x.npy", x_BSD)
    assert_refused(try_run("--input", "x.npy", *OUT, *CHUNKED, **SIZES), 4, "row 0, position 100")
    assert not SPOOL.exists()


@pytest.mark.parametrize("spool", ["card", "host", "file"])
def test_a_plan_says_when_a_row_would_begin_anew(spool: str) -> None:
    done = run(*OUT, "--chunk", "40", "--spool", spool, **SIZES)
    assert ("begins anew (not so with --spool file)" in done.stderr) is (spool != "file")
    assert {"card": "on the device", "host": "in host memory", "file": "in a file"}[spool] in done.stderr
    assert "begins anew" not in run("--chunk", "40", run_dir="none", **SIZES).stderr  # nothing is kept


def test_whole_rows_have_no_spool() -> None:
    assert_refused(try_run("--flow", "whole", "--spool", "file", **SIZES), 3, "whole rows have no spool")


def test_a_run_directory_has_room_for_the_spool_and_the_rows_to_be_kept_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run("--output", "z.npy", "--chunk", "40", run_dir="whole", **SIZES)
    kept_bytes = sum(load.nbytes for load in load_file("whole/weights.safetensors").values()) + 2 * 150 * 64 * 4
    stop(before=(0, 1, "enter", 80))  # its spool is there already
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=kept_bytes + 1000))
    done = try_run("--output", "w.npy", *CHUNKED, run_dir="new", **SIZES)
    assert_refused(done, 2, "for a spool, weights and 2 watched rows", "--watch fewer rows")
    assert not Path("w.npy").exists() and not Path("new").exists()
    run("--output", "w.npy", "--chunk", "40", "--spool", "host", run_dir="new", **SIZES)
    run(*OUT, *CHUNKED, "--resume", **SIZES)
