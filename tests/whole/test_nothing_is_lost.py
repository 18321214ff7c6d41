"""What a user had before a run is theirs: old outputs, earlier runs, inputs; a refused run leaves no trace."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commandline import (
    assert_nothing_left,
    assert_refused,
    frontier,
    is_complete,
    judge,
    manifest_of,
    run,
    small_case,
    try_run,
)
from safetensors import SafetensorError

import frontier as package
from frontier import rundir
from frontier.data import writing
from frontier.errors import DataError
from frontier.flows.engine import Engine

OLD = b"an old output that took a week"


def contents(folder: Path | str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_an_existing_output_is_refused_and_untouched() -> None:
    Path("y.npy").write_bytes(OLD)
    assert_refused(try_run("--output", "y.npy"), 2, "y.npy exists already", "--overwrite")
    assert Path("y.npy").read_bytes() == OLD and not Path("y.npy.partial").exists()
    assert not is_complete()


def test_overwrite_replaces_it_and_only_when_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("y.npy").write_bytes(OLD)
    np.save("x.npy", np.full((5, 150, 64), np.nan, np.float32))
    assert try_run("--output", "y.npy", "--input", "x.npy", "--overwrite").exit_code == 4
    assert Path("y.npy").read_bytes() == OLD
    run("--output", "y.npy", "--overwrite")
    assert np.load("y.npy").shape == (5, 150, 64)


def test_an_earlier_run_is_refused_and_untouched() -> None:
    run()
    before = contents("kept")
    assert_refused(try_run(), 2, "kept holds an earlier run", "--overwrite")
    assert contents("kept") == before


def test_overwrite_replaces_an_earlier_run_and_its_verdict() -> None:
    run("--watch", "1,2,3")
    assert judge().exit_code == 0
    run("--watch", "0", "--seed", "7", "--overwrite")
    assert not Path("kept/verdict.json").exists()
    assert [path.name for path in Path("kept/watched").iterdir()] == ["row_00000000.npy"]
    assert judge().exit_code == 0


BAD_OUTPUTS: dict[str, list[str]] = {
    "no folder": ["--output", "no/y.npy"],
    "a folder": ["--output", "folder.npy"],
    "another kind": ["--output", "y.bin"],
    "a long name": ["--output", "y" * 300 + ".npy"],
    "watched too far": ["--output", "y.npy", "--watch", "77"],
}


@pytest.mark.parametrize("words", BAD_OUTPUTS.values(), ids=[name.replace(" ", "-") for name in BAD_OUTPUTS])
def test_a_refused_run_leaves_an_earlier_one_as_it_was(words: list[str]) -> None:
    Path("folder.npy").mkdir()
    run()
    before = contents("kept")
    done = try_run("--overwrite", *words)
    assert_refused(done, 2)
    assert contents("kept") == before


@pytest.mark.parametrize("words", BAD_OUTPUTS.values(), ids=[name.replace(" ", "-") for name in BAD_OUTPUTS])
def test_a_refused_run_leaves_nothing_behind(words: list[str], folder: Path) -> None:
    Path("folder.npy").mkdir()
    assert_refused(try_run(*words), 2)
    assert [path.name for path in folder.iterdir()] == ["folder.npy"]


def test_a_disk_that_is_too_small_for_the_plan_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    done = try_run("--output", "y.npy")
    assert_refused(done, 3, "187.50 KiB on disk", "1000 B", "another disk")
    assert_nothing_left()
    assert not Path("kept").exists()


def test_a_disk_that_fills_up_before_the_space_is_reserved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, begin: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    done = try_run("--output", "y.npy")
    assert_refused(done, 2, "needs 187.62 KiB", "No space left", "free space")
    assert_nothing_left()


def test_a_disk_that_fails_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    true_write = writing.PartialFile.write

    def failing(self: writing.PartialFile, data: memoryview, offset_bytes: int) -> None:
        if offset_bytes:
            raise self._failure(OSError(errno.EIO, os.strerror(errno.EIO)))
        true_write(self, data, offset_bytes)

    monkeypatch.setattr(writing.PartialFile, "write", failing)
    assert_refused(try_run("--output", "y.npy"), 2, "y.npy cannot be written: Input/output error")
    assert not Path("y.npy").exists() and not is_complete()


def test_a_run_directory_whose_disk_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(rundir, "save_file", full)
    assert_refused(try_run("--output", "y.npy"), 2, "kept", "No space left on device")
    assert_nothing_left()


def test_a_folder_that_vanishes_is_told() -> None:
    Path("out").mkdir()
    true_pass = Engine.run_pass

    def vanishing(self: Engine, *arguments: Any, **options: Any) -> float:
        seconds = true_pass(self, *arguments, **options)
        shutil.rmtree("out")
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run_pass", vanishing)
        assert_refused(try_run("--output", "out/y.npy"), 2, "out/y.npy cannot be written: No such file or directory")
    assert not is_complete()


def test_an_input_is_never_replaced_by_its_own_output() -> None:
    rows_BSD = np.random.default_rng(1).standard_normal((5, 150, 64)).astype(np.float32)
    np.save("x.npy", rows_BSD)
    os.link("x.npy", "same.npy")
    before = Path("x.npy").read_bytes()
    assert_refused(try_run("--input", "x.npy", "--output", "x.npy", "--overwrite"), 2, "x.npy")
    assert Path("x.npy").read_bytes() == before
    assert not is_complete()


@pytest.mark.parametrize("flag", ["--input", "--weights", "--mask"])
def test_a_trace_never_replaces_what_the_run_reads_or_writes(flag: str) -> None:
    run(run_dir="earlier")
    shutil.copy("earlier/weights.safetensors", "w.safetensors")
    np.save("x.npy", np.zeros((5, 150, 64), np.float32))
    np.save("m.npy", np.tri(5, 150, dtype=bool))
    name = {"--input": "x.npy", "--weights": "w.safetensors", "--mask": "m.npy"}[flag]
    before = Path(name).read_bytes()
    done = try_run(flag, name, "--trace", name, "--output", "none")
    assert Path(name).read_bytes() == before
    assert_refused(done, 2, name)


def test_a_trace_that_exists_is_replaced_only_when_allowed() -> None:
    Path("t.json").write_bytes(OLD)
    assert_refused(try_run("--trace", "t.json"), 2, "t.json", "--overwrite")
    assert Path("t.json").read_bytes() == OLD
    run("--trace", "t.json", "--overwrite")
    assert Path("t.json").read_bytes() != OLD


def test_weights_may_come_from_the_run_directory_that_is_replaced() -> None:
    run()
    digest = manifest_of()["weights"]["sha256"]
    run("--weights", "kept/weights.safetensors", "--overwrite")
    assert manifest_of()["weights"] == {"kind": "file", "sha256": digest}
    assert judge().exit_code == 0


def test_a_mask_may_come_from_the_run_directory_that_is_replaced() -> None:
    np.save("m.npy", np.tri(5, 150, 75, dtype=bool))
    run("--mask", "m.npy")
    run("--mask", "kept/mask.npy", "--overwrite")
    assert judge().exit_code == 0


def test_two_runs_never_share_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts while the first computes."""
    true_pass = Engine.run_pass
    second: list[Any] = []

    def meanwhile(self: Engine, *arguments: Any, **options: Any) -> float:
        if not second:
            second.append(None)
            second[0] = try_run("--overwrite", "--seed", "7")
        return true_pass(self, *arguments, **options)

    monkeypatch.setattr(Engine, "run_pass", meanwhile)
    assert threading.current_thread() is threading.main_thread()
    try_run()
    assert second[0].exit_code == 2, "the second took the directory from under the first"
    assert judge().exit_code == 0


def test_runs_without_a_name_of_their_own_do_not_collide() -> None:
    words = ("run", "--device", "cpu", "--case", "2", "--seq-len", "5", "--quiet")
    assert [frontier(*words).exit_code for _ in range(2)] == [0, 0], "two runs within a second"


def test_a_start_that_failed_half_way_can_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "save_file", fill_the_disk)
        assert_refused(try_run(), 2, "No space left on device")
    run("--overwrite")


def test_what_nobody_foresaw_does_not_end_like_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*arguments: object) -> float:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Engine, "time_card", break_down)
    assert_refused(try_run("--ceilings"), 2, "an illegal memory access", "report")


def test_a_mask_of_another_batch_is_refused() -> None:
    case, machine = small_case(), package.Machine.detect("cpu")
    planned = package.plan(case, machine, package.choose(case, machine).recipe)
    with pytest.raises(DataError, match="the mask is"):
        package.run(planned, valid_BS=torch.zeros(case.batch_size + 1, case.seq_len, dtype=torch.bool))


def test_a_run_directory_without_room_for_its_rows_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 30, used=0, free=1000))
    done = try_run("--run-dir", "kept")
    assert_refused(done, 2, "for weights and 2 watched rows", "1000 B are free", "--watch fewer rows")
