"""The run directory's paper: what was asked, and which file holds what; nothing in it is trusted.

Takes    a run directory.
Gives    a checked `Manifest`; paths that provably stay inside the directory.
Knows nothing of tensors, formulas or verdicts; imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from referee.case import Case, take
from referee.errors import CannotJudge

MANIFEST_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One row whose output the run kept, whole or over some ranges of positions, ascending, end to end in its file."""

    row: int
    ranges: tuple[tuple[int, int], ...]
    input_sha256: str
    output_path: Path
    output_sha256: str

    @property
    def positions(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that the referee believes about a run, after checking it."""

    run_dir: Path
    sha256: str
    case: Case
    input_path: Path | None  # None when the input is seeded
    input_tensor: str | None
    weights_path: Path
    weights_sha256: str
    weights_seeded: bool
    output_path: Path | None  # None when the run kept no file of it
    mask_path: Path | None
    mask_sha256: str | None
    watched: tuple[Watched, ...]


def inside(run_dir: Path, relative: str) -> Path:
    """The file `relative` of the run, which may not leave its directory, by name or by link.

    Raises   CannotJudge.
    """
    try:
        path = (run_dir / relative).resolve()
        stays = not Path(relative).is_absolute() and path.is_relative_to(run_dir.resolve())
        there = stays and path.is_file()
    except (OSError, ValueError, RuntimeError) as fault:
        raise CannotJudge(f"{relative!r} is no usable path: {fault}", hint="the manifest is damaged") from fault
    if not stays:
        raise CannotJudge(
            f"the path {relative!r} leaves the run directory",
            hint="every path in a manifest must be relative and stay inside; do not judge a run you do not trust",
        )
    if not there:
        raise CannotJudge(f"{relative} is missing from {run_dir}", hint="the run is not whole; run it again")
    return path


def read_manifest(run_dir: Path) -> Manifest:
    """Read and check `manifest.json`.

    Raises   CannotJudge, when this is no run directory, the run is unfinished, or a field is wrong.
    """
    if not (run_dir / "manifest.json").exists():
        raise CannotJudge(f"{run_dir} is no run directory: no manifest.json", hint="give the directory of a run")
    path, where = inside(run_dir, "manifest.json"), "manifest.json"
    try:
        if path.stat().st_size > MANIFEST_MOST_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes, more than {MANIFEST_MOST_BYTES:,}")
        raw = path.read_bytes()
        root = take({where: json.loads(raw)}, run_dir.name, where, dict)
    except (OSError, ValueError, RecursionError) as fault:
        raise CannotJudge(f"{where} is damaged: {fault}", hint="it should be JSON; run again") from fault
    if root.get("schema") != 1:
        raise CannotJudge(f"{where} has schema {root.get('schema')!r}, not 1", hint="use a matching referee")
    if not take(root, where, "complete", bool):
        raise CannotJudge(
            "the run is not complete: its manifest says `complete` is false",
            hint="let it finish, or resume it, then judge",
        )
    case = Case.from_table(take(root, where, "case", dict), f"{where}: case")
    source, weights = take(root, where, "input", dict), take(root, where, "weights", dict)
    from_file = _kind(source, f"{where}: input") == "file"
    mask = take(root, where, "mask", dict) if root.get("mask") is not None else None
    mask_sha256 = None if mask is None else _sha256(mask, f"{where}: mask", "sha256")
    return Manifest(
        run_dir=run_dir,
        sha256=hashlib.sha256(raw).hexdigest(),
        case=case,
        input_path=Path(take(source, f"{where}: input", "path", str)) if from_file else None,
        input_tensor=take(source, f"{where}: input", "tensor", str) if from_file and "tensor" in source else None,
        weights_path=inside(run_dir, "weights.safetensors"),
        weights_sha256=_sha256(weights, f"{where}: weights", "sha256"),
        weights_seeded=_kind(weights, f"{where}: weights") == "seeded",
        output_path=_read_output(root.get("output")),
        mask_path=None if mask is None else inside(run_dir, "mask.npy"),
        mask_sha256=mask_sha256,
        watched=_read_watched(run_dir, root.get("watched"), case),
    )


def _read_output(told: object) -> Path | None:
    """The file of the whole output; a run that kept none has another word there, or nothing."""
    if isinstance(told, str) and told.startswith("/") and told.endswith((".npy", ".safetensors")):
        return Path(told)
    return None


def _kind(table: Mapping[str, Any], where: str) -> str:
    kind = take(table, where, "kind", str)
    if kind not in ("seeded", "file"):
        raise CannotJudge(f"{where}: unknown kind {kind!r}", hint="known kinds: seeded, file")
    return kind


def _sha256(table: Mapping[str, Any], where: str, key: str) -> str:
    value = take(table, where, key, str)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise CannotJudge(f"{where}: `{key}` is no SHA-256: {value[:70]!r}", hint="the manifest is damaged")
    return value


def _read_watched(run_dir: Path, entries: object, case: Case) -> tuple[Watched, ...]:
    if not isinstance(entries, list) or not entries:
        raise CannotJudge("the run watched no rows: there is no output to judge", hint="run again and watch some")
    watched: dict[int, Watched] = {}
    for place, entry in enumerate(entries):
        where = f"manifest.json: watched[{place}]"
        entry = take({"entry": entry}, where, "entry", dict)
        row = take(entry, where, "row", int)
        if row >= case.batch_size or row in watched:
            odd = "stands there twice" if row in watched else f"is beyond the batch of {case.batch_size}"
            raise CannotJudge(f"{where}: row {row} {odd}", hint="the manifest is damaged")
        watched[row] = Watched(
            row=row,
            ranges=_read_ranges(entry.get("positions"), where, case.seq_len),
            input_sha256=_sha256(entry, where, "input_sha256"),
            output_path=inside(run_dir, take(entry, where, "output", str)),
            output_sha256=_sha256(entry, where, "output_sha256"),
        )
    return tuple(watched[row] for row in sorted(watched))


def _read_ranges(ranges: object, where: str, seq_len: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of positions, ascending and apart; the whole row where none are given."""
    if ranges is None:
        return ((0, seq_len),)
    found: list[tuple[int, int]] = []
    for entry in ranges if isinstance(ranges, list) and ranges else [None]:
        pair = entry if isinstance(entry, list) and [type(end) for end in entry] == [int, int] else [-1, -1]
        if not (found[-1][1] if found else 0) <= pair[0] < pair[1] <= seq_len:
            raise CannotJudge(
                f"{where}: `positions` must be ascending ranges [start, stop] within {seq_len:,}, found {entry!r:.50}",
                hint="configs/CONTRACT.md describes the format",
            )
        found.append((pair[0], pair[1]))
    return tuple(found)
