"""The directory that a run leaves behind, and from which the referee works (contract section 6).

Takes    a plan, weights, watched rows, a record.
Gives    files that hold each other's hashes; `complete` turns true last.
Knows nothing of how the run goes.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from frontier.data.hashing import file_hash
from frontier.data.reading import InputFile
from frontier.data.sinks import FileSink
from frontier.errors import DataError, ResumeError, RunDirError
from frontier.layers.weights import State
from frontier.ledger import SPOOL, spool_size
from frontier.planner import Plan
from frontier.record import Record
from frontier.stream.journal import Claims, Journal, Part, read_journal
from frontier.units import MIB, show_bytes

SCHEMA = 1
MANIFEST, WEIGHTS, MASK, RECORD = "manifest.json", "weights.safetensors", "mask.npy", "record.json"
JOURNAL, _VERDICT, WATCHED = "journal.jsonl", "verdict.json", "watched"

# What makes a run another one, and what may differ from start to start but costs the promise of the same bytes.
_IDENTITY = ("case", "input", "weights", "mask", "recipe", "output")
_DRIFT = ("cut", "machine", "versions", "source_sha256")
_FILE_CAP_BYTES = 64 * MIB
_ANEW = "give what the run was started with, or start anew with --overwrite"


class RunDir:
    """One run's directory, held by a lock from `with` to its end. Nothing in it changes before `begin`.

    With `resume` a run that was killed in it is gone on with; where none came so far, one begins.

    Raises   RunDirError if the path holds an earlier run (unless `overwrite` or `resume`) or anything else, if another
             run holds it, or if it cannot be written; ResumeError if the earlier run's manifest is damaged.
    """

    def __init__(self, path: Path, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self.drifted: list[str] = []
        self.parts: list[Part] = []  # of the row that the earlier run was at
        self._overwrite, self._resume, self._made_here = overwrite, resume, False
        self._earlier: dict[str, Any] | None = None
        self._manifest: dict[str, Any] = {}
        self._held_fd: int | None = None

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
        if self._resume:
            self._earlier = self._read_manifest()
        elif names and not self._overwrite:
            hint = "--resume goes on with it if it was stopped, --overwrite replaces it, --run-dir names another"
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
        own = (MANIFEST, WEIGHTS, MASK, RECORD, JOURNAL, SPOOL, _VERDICT)
        return folder == os.path.realpath(self.path) and name.removesuffix(".partial") in own

    def finished_record(self) -> Record | None:
        """The record of the earlier run, if that is complete and nothing is left to do."""
        if self._earlier is None or self._earlier.get("complete") is not True:
            return None
        try:
            return Record.from_json(_bytes_of(self.path / RECORD))
        except DataError as reason:
            raise ResumeError(f"{self.path / RECORD} is damaged: {reason}", hint=_ANEW) from None

    def claims(self, plan: Plan, source: dict[str, Any], output: str) -> Claims | None:
        """What the earlier run has finished; None if it never came so far as to keep a journal.

        Raises   ResumeError naming what is not as it was, or if the journal is damaged in its first line.
        """
        if self._earlier is None:
            return None
        for name, now in _known_early(plan, source, output).items():
            self._check_same(name, now)
        claims = read_journal(self.path / JOURNAL, plan.case.batch_size)
        if claims is not None and claims.run != _fingerprint(self._earlier):
            raise ResumeError(f"{self.path / JOURNAL} is not of the run that {MANIFEST} speaks of", hint=_ANEW)
        self.parts = [] if claims is None else claims.parts
        return claims

    def begin(
        self,
        plan: Plan,
        state: State,
        *,
        source: dict[str, Any],
        output: str,
        weights_kind: str,
        valid_BS: Tensor | None,
        watched_rows: int,
        **facts: Any,
    ) -> None:
        """Drop what an earlier run left, unless it is gone on with; write weights, mask and a manifest that is not
        complete yet.

        Raises   RunDirError if the disk has no room for the weights and for the rows to be saved at the end;
                 ResumeError if a run to go on with had other weights or another mask.
        """
        with self._explained():
            free_bytes = shutil.disk_usage(self.path).free + sum(old.lstat().st_size for old in self.path.glob(SPOOL))
        needed_bytes = watched_rows * plan.case.row_bytes + sum(tensor.nbytes for tensor in state.values())
        needed_bytes += spool_size(plan.case, plan.recipe, "disk") if plan.spool == "disk" else 0
        if needed_bytes > free_bytes:
            raise RunDirError(
                f"{self.path} needs {show_bytes(needed_bytes)} for {'a spool, ' * (plan.spool == 'disk')}weights and "
                f"{watched_rows} watched rows, {show_bytes(free_bytes)} are free",
                hint="name a --run-dir on another disk, or --watch fewer rows",
            )
        with self._explained():
            if self._earlier is None:
                self._drop_all()
            with self._replaced(WEIGHTS) as partial:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, partial)
                weights = {"kind": weights_kind, "sha256": file_hash(partial)}
                self._check_same("weights", weights)
            mask = None
            if valid_BS is not None:
                with self._replaced(MASK) as partial:
                    with open(partial, "wb") as file:
                        np.save(file, valid_BS.numpy(), allow_pickle=False)
                    mask = {"sha256": file_hash(partial)}
                    self._check_same("mask", mask)
            self._check_same("mask", mask)
            self._manifest = {
                "schema": SCHEMA,
                "complete": False,
                **_known_early(plan, source, output),
                "weights": weights,
                "mask": mask,
                "watched": [],
                "plan": plan.as_dict(),
                "cut": plan.cut,
                "torch": torch.__version__,
                **facts,
            }
            if self._earlier is not None:
                self.drifted = [name for name in _DRIFT if self._earlier.get(name) != self._manifest.get(name)]
            self._write(MANIFEST, json.dumps(self._manifest, indent=1))

    def journal(self, sink: FileSink, sync: Callable[[], None], parts: Sequence[Part]) -> Journal:
        """The journal of the run that has begun, with what an earlier start of it claims."""
        with self._explained():
            return Journal(self.path / JOURNAL, _fingerprint(self._manifest), sink.row_hash, sync, sink.claimed, parts)

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
        try:
            yield partial
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, self.path / name)

    def _drop_all(self) -> None:
        # A journal's claims, an old verdict or an old row must never stand beside a new manifest; and without any
        # manifest, a start that fails half-way would leave a directory that --overwrite takes for somebody else's.
        for name in (JOURNAL, SPOOL, _VERDICT):
            (self.path / name).unlink(missing_ok=True)
        self._write(MANIFEST, json.dumps({"schema": SCHEMA, "complete": False}))
        for name in (WEIGHTS, MASK, RECORD):
            (self.path / name).unlink(missing_ok=True)
        for old_row in (self.path / WATCHED).glob("row_*.npy*"):
            old_row.unlink()

    def _read_manifest(self) -> dict[str, Any] | None:
        """The earlier run's manifest, or None if it was killed before it had written one."""
        path = self.path / MANIFEST
        if not os.path.lexists(path):
            return None
        try:
            manifest = json.loads(_bytes_of(path))
            if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
                raise ValueError(f"it is no manifest of schema {SCHEMA}")
        except (DataError, ValueError, RecursionError) as reason:
            raise ResumeError(f"{path} is damaged: {reason}", hint="start anew with --overwrite") from None
        return manifest if "case" in manifest else None

    def _check_same(self, name: str, now: Any) -> None:
        """That the run to go on with had just this."""
        if self._earlier is None:
            return
        then, now = (_without_name(told) for told in (self._earlier.get(name), json.loads(json.dumps(now))))
        if then != now:
            if isinstance(then, dict) and isinstance(now, dict):
                keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
                name, then, now = f"{name} ({', '.join(keys)})", then.get(keys[0]), now.get(keys[0])
            raise ResumeError(
                f"{self.path} holds a run that cannot be gone on with: its {name} was {str(then)[:80]}, "
                f"now it is {str(now)[:80]}",
                hint=_ANEW,
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as reason:
            said = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
            raise RunDirError(
                f"{self.path} cannot be a run directory: {said}", hint="name another with --run-dir"
            ) from None


def _bytes_of(path: Path) -> bytes:
    """All of a regular file that is no larger than a manifest can be."""
    file = InputFile(path)
    try:
        if file.size_bytes > _FILE_CAP_BYTES:
            raise DataError(f"{path} has {show_bytes(file.size_bytes)}", hint="start anew with --overwrite")
        return file.head(file.size_bytes)
    finally:
        file.close()


def _known_early(plan: Plan, source: dict[str, Any], output: str) -> dict[str, Any]:
    """What tells one run from another before its weights are made."""
    return {"case": plan.case.as_dict(), "input": source, "recipe": str(plan.recipe), "output": output}


def _fingerprint(manifest: dict[str, Any]) -> str:
    """A hash of all that makes a run another one."""
    told = json.dumps({name: _without_name(manifest.get(name)) for name in _IDENTITY}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _without_name(told: Any) -> Any:
    """A case may be called otherwise; it is the same if its sizes and seed are."""
    return {key: value for key, value in told.items() if key != "name"} if isinstance(told, dict) else told
