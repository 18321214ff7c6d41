"""The directory that a run leaves behind, and from which the referee works (contract section 6).

Takes    a plan, weights, watched rows, a record.
Gives    files that hold each other's hashes; `complete` turns true last.
Knows nothing of how the run goes.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from frontier.data.hashing import file_hash
from frontier.errors import RunDirError
from frontier.layers.weights import State
from frontier.planner import Plan
from frontier.record import Record

SCHEMA = 1
MANIFEST, WEIGHTS, MASK, RECORD, VERDICT = (
    "manifest.json",
    "weights.safetensors",
    "mask.npy",
    "record.json",
    "verdict.json",
)


class RunDir:
    """One run's directory, empty at first.

    Raises   RunDirError if the path holds an earlier run (unless `overwrite`) or anything else.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        self._manifest: dict[str, Any] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir()}
        except OSError as reason:
            raise RunDirError(f"{path} cannot be a run directory: {reason.strerror}", hint="name another") from None
        if names and MANIFEST not in names:
            raise RunDirError(
                f"{path} holds {len(names)} files and none is {MANIFEST}: it is not a run directory",
                hint="name an empty or new one with --run-dir",
            )
        if names and not overwrite:
            raise RunDirError(f"{path} holds an earlier run", hint="--overwrite replaces it, --run-dir names another")
        # An old verdict or row must never stand beside a new manifest.
        for name in (MANIFEST, WEIGHTS, MASK, RECORD, VERDICT):
            (path / name).unlink(missing_ok=True)
        for old_row in (path / "watched").glob("row_*.npy"):
            old_row.unlink()

    def begin(
        self,
        plan: Plan,
        state: State,
        *,
        source: dict[str, Any],
        weights_kind: str,
        valid_BS: Tensor | None,
        **facts: Any,
    ) -> None:
        """Write weights, mask and a manifest that is not complete yet."""
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, self.path / WEIGHTS)
        if valid_BS is not None:
            np.save(self.path / MASK, valid_BS.numpy(), allow_pickle=False)
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
        self._write(RECORD, record.to_json())
        self._manifest |= {"watched": watched, "complete": True}
        self._write(MANIFEST, json.dumps(self._manifest, indent=1))

    def _write(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        partial.write_text(text + "\n")
        os.replace(partial, self.path / name)
