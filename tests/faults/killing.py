"""A run of twelve short rows, started with --resume again and again; what it must leave; faults to plant in it."""

import shutil
from pathlib import Path
from typing import Any

from nursery import Nursery

RUN = (
    *("run", "--case", "14", "--device", "cpu", "--recipe", "fp32/packed/dense", "--quiet", "--run-dir", "kept"),
    *("--batch-size", "12", "--seq-len", "64", "--d-model", "32", "--heads", "2", "--ffn-dim", "32", "--layers", "1"),
    *("--watch", "0,7,11"),
)
GO_ON = (*RUN, "--output", "y.npy", "--resume")
KILLED = -9


def kept_bytes(folder: Path) -> dict[str, bytes]:
    """The output and the watched rows, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.npy"))}


def clear(folder: Path) -> None:
    shutil.rmtree(folder / "kept", ignore_errors=True)
    for path in folder.glob("y.npy*"):
        path.unlink()


def go_on_to_the_end(nursery: Nursery, folder: Path, *words: str, **asked: Any) -> dict[str, bytes]:
    """What a resume leaves, which must succeed."""
    ended = nursery.run(folder, *GO_ON, *words, **asked)
    assert ended["ending"] == 0, ended
    assert not (folder / "y.npy.partial").exists()
    return kept_bytes(folder)
