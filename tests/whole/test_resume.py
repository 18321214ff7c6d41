"""A stopped run goes on to the bytes it would have had; another run is refused, and what changed is named."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import assert_refused, frontier, is_complete, judge, run, try_run
from safetensors.torch import load_file, save_file

from frontier import planner
from frontier.data.sinks import FileSink
from frontier.record import Record

HEADER_BYTES = 128
ROW_BYTES = 150 * 64 * 4
OUT = ("--output", "y.npy")


def stop(*words: Any, after: int = 2) -> None:
    """A run that is stopped when it has written this many slices of two rows."""
    true_write, done = FileSink.write, 0

    def write(self: FileSink, *arguments: Any) -> None:
        nonlocal done
        if done == after:
            raise KeyboardInterrupt
        done += 1
        true_write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "write", write)
        assert try_run(*OUT, *words).exit_code == 130
    assert not is_complete() and Path("y.npy.partial").exists()


def tree() -> dict[str, bytes]:
    """Every file here, less what only a start that is refused may leave: nothing."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def undisturbed(*words: Any, **sizes: Any) -> bytes:
    run("--output", "z.npy", *words, run_dir="undisturbed", **sizes)
    return Path("z.npy").read_bytes()


def spoil(offset_bytes: int, path: str = "y.npy.partial") -> None:
    with open(path, "r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 1]))


def record() -> Record:
    return Record.from_json(Path("kept/record.json").read_bytes())


@pytest.mark.parametrize("words", [(), ("--verify",), ("--resident",), ("--overwrite",), ("--ring-depth", "1")])
def test_a_stopped_run_goes_on_to_the_same_bytes_and_passes_the_referee(words: tuple[str, ...]) -> None:
    wanted = undisturbed()
    stop()
    done = run(*OUT, "--resume", *words)
    assert "4 rows were done; times are of the others; same cut, so the same bytes" in done.stdout
    assert Path("y.npy").read_bytes() == wanted
    assert judge().exit_code == 0
    assert record().kind == "resumed" and record().notes["resumed"] == {"done_rows": 4, "drifted": []}
    assert record().flops * 5 == Record.from_json(Path("undisturbed/record.json").read_bytes()).flops


def test_a_run_from_files_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_BSD = np.random.default_rng(3).standard_normal((5, 150, 64)).astype(np.float32)
    np.save("x.npy", rows_BSD)
    np.save("m.npy", np.tri(5, 150, 75, dtype=bool))
    words = ("--input", "x.npy", "--mask", "m.npy", "--watch", "0,1,4")
    wanted = undisturbed(*words)
    stop(*words, after=1)
    run(*OUT, *words, "--resume")
    assert Path("y.npy").read_bytes() == wanted
    assert judge().exit_code == 0


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_resuming_where_nothing_was_begun_begins(words: tuple[str, ...]) -> None:
    wanted = undisturbed()
    run(*OUT, "--resume", *words)
    assert Path("y.npy").read_bytes() == wanted
    assert record().kind == "run" and record().notes == {}


def changed_weights() -> None:
    state = load_file("undisturbed/weights.safetensors")
    state["final_norm.bias"] += 1
    save_file(state, "w.safetensors")


def changed_input() -> None:
    os.utime("x.npy", ns=(0, os.stat("x.npy").st_mtime_ns + 1))


CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "the seed": (("--seed", "8"), ("case (seed)", "was 1234, now it is 8")),
    "the length": (("--seq-len", "151"), ("case (seq_len)", "was 150, now it is 151")),
    "fewer rows": (("--batch-size", "3"), ("case (batch_size)", "was 5, now it is 3")),
    "the recipe": (("--recipe", "fp32/packed/dense"), ("recipe was fp32/packed/flash", "now it is fp32/packed/dense")),
    "the weights": (("--weights", "w.safetensors"), ("weights (sha256)",)),
    "the mask": (("--mask", "m.npy"), ("mask was None",)),
    "an input file": (("--input", "x.npy"), ("input (kind", "was seeded, now it is file")),
    "the output": (("--output", "z.npy"), ("output", "z.npy")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_refused_with_what_changed_and_leaves_all_as_it_was(change: str) -> None:
    words, told = CHANGES[change]
    run(run_dir="undisturbed")
    np.save("x.npy", np.zeros((5, 150, 64), np.float32))
    np.save("m.npy", np.tri(5, 150, 75, dtype=bool))
    before_words = ("--weights", "undisturbed/weights.safetensors") if change == "the weights" else ()
    changed_weights()
    stop(*before_words)
    before = tree()
    assert_refused(try_run(*OUT, *before_words, "--resume", *words), 2, "cannot be gone on with", *told)
    assert tree() == before
    run(*OUT, *before_words, "--resume")


@pytest.mark.parametrize("by", ["touched", "other bytes of the same size", "another file"])
def test_an_input_that_changed_since_is_refused(by: str) -> None:
    rows_BSD = np.random.default_rng(3).standard_normal((5, 150, 64)).astype(np.float32)
    np.save("x.npy", rows_BSD)
    stop("--input", "x.npy")
    if by == "touched":
        changed_input()
    elif by == "another file":
        np.save("new.npy", rows_BSD)
        shutil.copystat("x.npy", "new.npy")
        os.utime("new.npy", ns=(0, os.stat("x.npy").st_mtime_ns - 7))
        os.replace("new.npy", "x.npy")
    else:
        np.save("x.npy", rows_BSD + 1)
    assert_refused(try_run(*OUT, "--input", "x.npy", "--resume"), 2, "its input (mtime_ns) was")


def test_a_finished_row_that_changed_is_refused_and_verify_makes_it_again() -> None:
    wanted = undisturbed()
    stop()
    spoil(HEADER_BYTES + 2 * ROW_BYTES + 77)
    before = tree()
    assert_refused(try_run(*OUT, "--resume"), 2, "1 of 4 finished rows looked at", "journal says: 2", "--verify")
    assert tree() == before
    run(*OUT, "--resume", "--verify")
    assert Path("y.npy").read_bytes() == wanted
    assert record().notes["resumed"]["done_rows"] == 3


def test_a_sample_of_many_finished_rows_is_looked_at_and_verify_looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    true_hash = FileSink.row_hash
    sizes = {"batch_size": 40, "seq_len": 50}
    stop_sizes = [word for key, size in sizes.items() for word in (f"--{key.replace('_', '-')}", str(size))]
    stop(*stop_sizes, after=5)  # of six rows each
    monkeypatch.setattr(FileSink, "row_hash", lambda self, row: looked.append(row) or true_hash(self, row))
    run(*OUT, "--resume", **sizes)
    first_made = looked.index(30)
    assert {0, 29} < set(looked[:first_made]) and first_made < 15
    assert max(looked) == 39, "the rows that were made are claimed too"
    shutil.rmtree("kept")
    os.unlink("y.npy")
    stop(*stop_sizes, after=5)
    looked.clear()
    run(*OUT, "--resume", "--verify", **sizes)
    assert looked[:30] == list(range(30))


@pytest.mark.parametrize("lost", ["the part", "the header", "the end"])
def test_a_part_that_is_not_what_the_run_left_is_refused(lost: str) -> None:
    stop()
    if lost == "the part":
        os.unlink("y.npy.partial")
    elif lost == "the header":
        spoil(60)
    else:
        os.truncate("y.npy.partial", 5 * ROW_BYTES)
    told = "cannot be gone on with: No such file" if lost == "the part" else "is not what the run left"
    assert_refused(try_run(*OUT, "--resume"), 2, told, "start anew with --overwrite")
    run(*OUT, "--overwrite")


@pytest.mark.parametrize("cut_bytes", [1, 20, 150])
def test_a_journal_that_was_cut_short_loses_its_last_line(cut_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    wanted = undisturbed()
    stop()
    os.truncate("kept/journal.jsonl", Path("kept/journal.jsonl").stat().st_size - cut_bytes)
    run(*OUT, "--resume")
    assert Path("y.npy").read_bytes() == wanted
    assert re.search("journal.jsonl is damaged in line [23]: what that claimed is made again", caplog.text)


def test_a_journal_damaged_in_its_first_line_is_refused() -> None:
    stop()
    spoil(20, "kept/journal.jsonl")
    assert_refused(try_run(*OUT, "--resume"), 2, "journal.jsonl is damaged in its first line", "--overwrite")
    run(*OUT, "--overwrite")


def test_a_journal_of_another_run_is_refused() -> None:
    stop("--seed", "5")
    shutil.copy("kept/journal.jsonl", "other.jsonl")
    shutil.rmtree("kept")
    os.unlink("y.npy.partial")
    stop()
    shutil.copy("other.jsonl", "kept/journal.jsonl")
    assert_refused(try_run(*OUT, "--resume"), 2, "journal.jsonl is not of the run that manifest.json speaks of")


def test_a_run_goes_on_with_shorter_slices_and_says_that_the_cut_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = np.frombuffer(undisturbed()[HEADER_BYTES:], np.float32)
    stop(after=1)
    monkeypatch.setattr(planner, "USUAL_SLICE_TOKENS", {True: 150, False: 450})
    run(*OUT, "--resume")
    got = np.frombuffer(Path("y.npy").read_bytes()[HEADER_BYTES:], np.float32)
    assert np.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert record().notes["resumed"] == {"done_rows": 2, "drifted": ["cut"]}
    assert judge().exit_code == 0


def test_a_complete_run_whose_output_is_gone_is_refused() -> None:
    run(*OUT)
    os.rename("y.npy", "elsewhere.npy")
    assert_refused(
        try_run(*OUT, "--resume"), 2, "the run in kept is complete, and y.npy cannot be opened: No such file"
    )
    os.rename("elsewhere.npy", "y.npy")
    run(*OUT, "--resume")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--resume", "--output", "none"), "--resume finishes an output file"),
        (("--resume", *OUT, "--passes", "2"), "the passes are 2"),
        (("--verify", *OUT), "--verify needs --resume"),
    ],
)
def test_a_resume_that_cannot_be_meant_is_refused(words: tuple[str, ...], told: str) -> None:
    assert_refused(try_run(*words), 2, told)


def test_a_resume_without_a_run_directory_is_refused() -> None:
    done = frontier("run", "--device", "cpu", "--case", "2", *OUT, "--resume")
    assert_refused(done, 2, "--resume needs the --run-dir")


@pytest.mark.parametrize("name", ["manifest.json", "journal.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "nested", "empty"])
def test_nothing_hostile_in_a_run_directory_is_followed_or_waited_for(name: str, kind: str) -> None:
    stop()
    path = Path("kept") / name
    path.rename("elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("../no/such/place")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("[" * 100_000 if kind == "nested" else "")
    assert_refused(try_run(*OUT, "--resume"), 2, name)


def test_a_manifest_that_is_too_large_is_refused_unread() -> None:
    stop()
    os.truncate("kept/manifest.json", 1 << 40)
    assert_refused(try_run(*OUT, "--resume"), 2, "manifest.json is damaged")


def test_an_output_that_bears_its_name_already_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from frontier.rundir import RunDir

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "finish", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert_refused(try_run(*OUT), 130, "y.npy is whole")
    wanted = Path("y.npy").read_bytes()
    spoil(HEADER_BYTES + 5, "y.npy")
    assert_refused(try_run(*OUT, "--resume", "--verify"), 2, "1 of 5 finished rows", "start anew")
    spoil(HEADER_BYTES + 5, "y.npy")
    run(*OUT, "--resume")
    assert Path("y.npy").read_bytes() == wanted and judge().exit_code == 0
    assert json.loads(Path("kept/record.json").read_text())["flops"] == 0
