"""A finished run's output is looked at once more, at a sample of its rows or at all, and never changed."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import assert_refused, manifest_of, run, small_case, try_run

from frontier.data.sinks import FileSink, FinishedFile
from frontier.rundir import RunDir
from frontier.stream import progress

ROW_BYTES = 150 * 64 * 4
NAMES = ["y.npy", "y.safetensors"]
MANY = {"batch_size": 40, "seq_len": 50}


def tree() -> dict[str, tuple[bytes, int]]:
    """Every file here with its time of last change."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in Path().rglob("*") if path.is_file()}


def flip_a_bit(name: str, row: int, row_bytes: int = ROW_BYTES, num_rows: int = 5) -> None:
    """The last bit of a row, and the time of last change put back: only the bytes can tell."""
    place, told = Path(name).stat().st_size - row_bytes * (num_rows - row - 1) - 4, os.stat(name)
    with open(name, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(name, ns=(told.st_atime_ns, told.st_mtime_ns))


def assert_refused_unchanged(name: str, *says: str, verify: bool = True, **sizes: Any) -> None:
    before = tree()
    done = try_run("--output", name, "--resume", *(["--verify"] if verify else []), **sizes)
    assert_refused(done, 2, "the run in kept is complete, and ", *says, "--overwrite and without --resume")
    assert tree() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_output_is_looked_at_and_said_to_be_as_written(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run("--output", name)
    before = tree()
    for words in ((), ("--verify",)):
        run("--output", name, "--resume", *words)
        told = f"kept is complete: nothing is left to do; 5 of 5 rows in {name} were looked at and are as written"
        assert told in caplog.text
        caplog.clear()
    assert tree() == before


@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_one_altered_bit_in_any_row_is_refused_by_file_and_row(name: str, row: int) -> None:
    run("--output", name)
    flip_a_bit(name, row)
    assert_refused_unchanged(name, f"1 of 5 finished rows looked at in {name}", f"journal says: {row}")
    flip_a_bit(name, row)
    run("--output", name, "--resume", "--verify")


def test_a_sample_is_looked_at_with_the_watched_rows_and_verify_looks_at_all(caplog: pytest.LogCaptureFixture) -> None:
    run("--output", "y.npy", "--watch", "0,17", **MANY)
    told = [(f"{num} of 40 rows in y.npy were looked at", words) for num, words in ((10, []), (40, ["--verify"]))]
    for said, words in told:
        run("--output", "y.npy", "--watch", "0,17", "--resume", *words, **MANY)
        assert said in caplog.text
    flip_a_bit("y.npy", 18, 50 * 64 * 4, 40)  # no row of the sample
    run("--output", "y.npy", "--watch", "0,17", "--resume", **MANY)
    assert_refused_unchanged("y.npy", "1 of 40 finished rows looked at in y.npy", "journal says: 18", **MANY)
    flip_a_bit("y.npy", 17, 50 * 64 * 4, 40)
    done = try_run("--output", "y.npy", "--watch", "0,17", "--resume", **MANY)
    assert_refused(done, 2, "1 of 10 finished rows looked at in y.npy", "journal says: 17")


def test_several_altered_rows_are_all_named() -> None:
    run("--output", "y.npy")
    for row in (0, 2, 4):
        flip_a_bit("y.npy", row)
    assert_refused_unchanged("y.npy", "3 of 5 finished rows looked at in y.npy", "journal says: 0, 2, 4")


def gone(name: str) -> None:
    os.unlink(name)


def cut_short(name: str) -> None:
    os.truncate(name, Path(name).stat().st_size - 1)


def gone_on_with(name: str) -> None:
    os.truncate(name, Path(name).stat().st_size + 1)


def emptied(name: str) -> None:
    os.truncate(name, 0)


def of_another_shape(name: str) -> None:
    held = Path(name).read_bytes()
    assert held.count(b"150, 64") + held.count(b"150,64") == 1
    Path(name).write_bytes(held.replace(b"150, 64", b"64, 150").replace(b"150,64", b"64,150"))


def a_folder(name: str) -> None:
    os.unlink(name)
    os.mkdir(name)


def a_pipe(name: str) -> None:
    os.unlink(name)
    os.mkfifo(name)


def a_dangling_link(name: str) -> None:
    os.unlink(name)
    os.symlink("nowhere", name)


LOSSES = {
    gone: "cannot be opened: No such file",
    cut_short: " bytes, ",
    gone_on_with: " bytes, ",
    emptied: "has 0 bytes",
    of_another_shape: "with the header of its run expected",
    a_folder: "is a directory",
    a_pipe: "is a device or pipe",
    a_dangling_link: "cannot be opened: No such file",
}


@pytest.mark.parametrize("verify", [False, True], ids=["", "--verify"])
@pytest.mark.parametrize("lose", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_is_not_what_the_run_left_is_refused(name: str, lose: Any, verify: bool) -> None:
    run("--output", name)
    lose(name)
    assert_refused_unchanged(name, name, LOSSES[lose], verify=verify)


def test_an_output_replaced_by_another_runs_is_refused() -> None:
    run("--output", "y.npy")
    run("--output", "z.npy", "--seed", "7", run_dir="other")
    os.replace("z.npy", "y.npy")
    assert_refused_unchanged("y.npy", "5 of 5 finished rows looked at in y.npy")


def test_an_output_moved_to_another_disk_behind_a_link_is_as_written(caplog: pytest.LogCaptureFixture) -> None:
    run("--output", "y.npy")
    os.mkdir("large")
    shutil.move("y.npy", "large/y.npy")
    os.symlink("large/y.npy", "y.npy")
    os.chmod("large/y.npy", 0o400)
    run("--output", "y.npy", "--resume", "--verify")
    assert "5 of 5 rows in y.npy were looked at and are as written" in caplog.text


def test_an_output_that_took_the_place_of_a_link_is_known_by_that_place() -> None:
    Path("old.npy").write_bytes(b"old")
    os.symlink("old.npy", "y.npy")
    run("--output", "y.npy", "--overwrite")
    assert Path("old.npy").read_bytes() == b"old" and not Path("y.npy").is_symlink()
    assert manifest_of()["output"] == os.path.realpath("y.npy")
    run("--output", "y.npy", "--resume", "--verify")


def test_a_part_of_another_run_beside_it_is_left_alone() -> None:
    run("--output", "y.npy")
    Path("y.npy.partial").write_bytes(b"another's")
    run("--output", "y.npy", "--resume", "--verify")
    assert Path("y.npy.partial").read_bytes() == b"another's"


def test_rows_that_no_journal_claims_cannot_be_verified(caplog: pytest.LogCaptureFixture) -> None:
    run("--output", "y.npy")
    os.rename("kept/journal.jsonl", "elsewhere")
    run("--output", "y.npy", "--resume")
    assert "0 of 5 rows in y.npy were looked at" in caplog.text
    assert_refused_unchanged("y.npy", "y.npy is whole and the journal claims 0 of its 5 rows")


@pytest.mark.parametrize("output", ["none", "memory", "-"])
def test_an_output_that_is_no_file_leaves_nothing_to_look_at(output: str) -> None:
    run("--output", "y.npy")
    done = try_run("--output", output, "--resume", "--verify")
    assert_refused(done, 2, "a pipe passes each row once" if output == "-" else "there is nothing to look at")


def test_a_look_that_is_not_taken_would_let_an_altered_bit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with hashes that are not of the file, the tests above would see nothing."""
    run("--output", "y.npy")
    with contextlib.closing(FinishedFile("y.npy", small_case(), 2)) as file:
        hashes = [file.row_hash(row) for row in range(5)]
    flip_a_bit("y.npy", 3)
    with monkeypatch.context() as patch:
        patch.setattr(FinishedFile, "row_hash", lambda self, row: hashes[row])
        run("--output", "y.npy", "--resume", "--verify")
    assert_refused_unchanged("y.npy", "journal says: 3")


@pytest.mark.parametrize("words", [(), ("--quiet",)])
def test_a_look_tells_how_far_it_is(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    run("--output", "y.npy")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    done = run("--output", "y.npy", "--resume", "--verify", *words)
    assert ("3 of 5 claimed rows, " in done.stderr and "GiB" not in done.stderr) is (not words)


@pytest.mark.parametrize("claims", ["of the last rows", "of all"])
def test_a_whole_output_of_a_run_killed_at_its_end_is_never_written_under_its_name(
    monkeypatch: pytest.MonkeyPatch, claims: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "finish", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert try_run("--output", "y.npy").exit_code == 130
    journal = Path("kept/journal.jsonl").read_bytes()
    lines = journal.splitlines(keepends=True)
    lost = lines[-1:] if claims == "of the last rows" else lines[1:]
    os.truncate("kept/journal.jsonl", len(journal) - sum(map(len, lost)) + (claims == "of the last rows"))
    before = Path("y.npy").read_bytes(), os.stat("y.npy").st_mtime_ns
    done = try_run("--output", "y.npy", "--resume")
    assert_refused(done, 2, "y.npy is whole and the journal claims ", " of its 5 rows", "start anew with --overwrite")
    assert (Path("y.npy").read_bytes(), os.stat("y.npy").st_mtime_ns) == before
    Path("kept/journal.jsonl").write_bytes(journal)
    run("--output", "y.npy", "--resume")


def test_an_older_output_that_may_be_replaced_does_not_stop_a_run_that_claimed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("y.npy").write_bytes(b"an older one")
    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "write", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert try_run("--output", "y.npy", "--overwrite").exit_code == 130
    assert Path("y.npy").read_bytes() == b"an older one" and not Path("y.npy.partial").exists()
    refused = try_run("--output", "y.npy", "--resume")
    assert_refused(refused, 2, "y.npy exists already", "--overwrite")
    run("--output", "y.npy", "--resume", "--overwrite")
    assert np.load("y.npy").shape[0] == 5
