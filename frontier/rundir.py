"""The directory that a run leaves behind, and from which the referee works (contract section 6).

Takes    a plan, weights, watched rows, a record.
Gives    files that hold each other's hashes; `complete` turns true last.
Knows nothing of how the run goes.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from frontier.data.hashing import file_hash
from frontier.errors import RunDirError
from frontier.layers.weights import State
from frontier.planner import Plan
from frontier.record import Record
from frontier.units import show_bytes

SCHEMA = 1
MANIFEST, WEIGHTS, MASK, RECORD = "manifest.json", "weights.safetensors", "mask.npy", "record.json"
_VERDICT, WATCHED = "verdict.json", "watched"


class RunDir:
    """One run's directory, held by a lock from `with` to its end. Nothing in it changes before `begin`.

    Raises   RunDirError if the path holds an earlier run (unless `overwrite`) or anything else, if another run
             holds it, or if it cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        self._overwrite = overwrite
        self._manifest: dict[str, Any] = {}
        self._held_fd: int | None = None
        self._made_here = False

    def __enter__(self) -> "RunDir":
        with self._explained():
            self._made_here = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._held_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._claim()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _claim(self) -> None:
        assert self._held_fd is not None
        with self._explained():
            try:
                fcntl.flock(self._held_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                hint = "wait for it, or name another with --run-dir"
                raise RunDirError(f"{self.path} is in use by another run", hint=hint) from None
            names = set(os.listdir(self.path))
        if names and not names & {MANIFEST, f"{MANIFEST}.partial"}:
            raise RunDirError(
                f"{self.path} holds {len(names)} files and none is {MANIFEST}: it is not a run directory",
                hint="name an empty or new one with --run-dir",
            )
        if names and not self._overwrite:
            hint = "--overwrite replaces it, --run-dir names another"
            raise RunDirError(f"{self.path} holds an earlier run", hint=hint)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._made_here:
            with contextlib.suppress(OSError):  # it is not empty: a run began in it
                self.path.rmdir()
        if self._held_fd is not None:
            os.close(self._held_fd)
            self._held_fd = None

    def owns(self, path: str | Path) -> bool:
        """Whether `path` is one of the files that a run writes into its directory by itself."""
        place = os.path.realpath(path)
        folder, name = os.path.split(place)
        if folder == os.path.realpath(self.path / WATCHED):
            return True
        own = (MANIFEST, WEIGHTS, MASK, RECORD, _VERDICT)
        return folder == os.path.realpath(self.path) and name.removesuffix(".partial") in own

    def begin(
        self,
        plan: Plan,
        state: State,
        *,
        source: dict[str, Any],
        weights_kind: str,
        valid_BS: Tensor | None,
        watched_rows: int,
        **facts: Any,
    ) -> None:
        """Drop what an earlier run left; write weights, mask and a manifest that is not complete yet.

        Raises   RunDirError if the disk has no room for the weights and for the rows to be saved at the end.
        """
        with self._explained():
            free_bytes = shutil.disk_usage(self.path).free
        needed_bytes = watched_rows * plan.case.row_bytes + sum(tensor.nbytes for tensor in state.values())
        if needed_bytes > free_bytes:
            raise RunDirError(
                f"{self.path} needs {show_bytes(needed_bytes)} for weights and {watched_rows} watched rows, "
                f"{show_bytes(free_bytes)} are free",
                hint="name a --run-dir on another disk, or --watch fewer rows",
            )
        with self._explained():
            # An old verdict or row must never stand beside a new manifest; and without any manifest, a start that
            # fails half-way would leave a directory that --overwrite takes for somebody else's.
            (self.path / _VERDICT).unlink(missing_ok=True)
            self._write(MANIFEST, json.dumps({"schema": SCHEMA, "complete": False}))
            for name in (WEIGHTS, MASK, RECORD):
                (self.path / name).unlink(missing_ok=True)
            for old_row in (self.path / WATCHED).glob("row_*.npy*"):
                old_row.unlink()
            with self._replaced(WEIGHTS) as partial:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial)
            if valid_BS is not None:
                with self._replaced(MASK) as partial, open(partial, "wb") as file:
                    np.save(file, valid_BS.numpy(), allow_pickle=False)
            self._manifest = {
                "schema": SCHEMA,
                "complete": False,
                "case": plan.case.as_dict(),
                "input": source,
                "weights": {"kind": weights_kind, "sha256": file_hash(self.path / WEIGHTS)},
                "mask": None if valid_BS is None else {"sha256": file_hash(self.path / MASK)},
                "watched": [],
                "plan": plan.as_dict(),
                "torch": torch.__version__,
                **facts,
            }
            self._write(MANIFEST, json.dumps(self._manifest, indent=1))

    def finish(self, watched: list[dict[str, Any]], record: Record) -> None:
        """Write the record, then the manifest that vouches for everything beside it."""
        with self._explained():
            self._write(RECORD, record.to_json())
            self._manifest |= {"watched": watched, "complete": True}
            self._write(MANIFEST, json.dumps(self._manifest, indent=1))

    def _write(self, name: str, text: str) -> None:
        with self._replaced(name) as partial:
            partial.write_text(text + "\n")

    @contextlib.contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """A path to write to; it takes `name` only when all of it is there."""
        partial = self.path / f"{name}.partial"
        yield partial
        os.replace(partial, self.path / name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as reason:
            said = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
            raise RunDirError(
                f"{self.path} cannot be a run directory: {said}", hint="name another with --run-dir"
            ) from None
