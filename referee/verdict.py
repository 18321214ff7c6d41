"""A judgement from start to verdict: trust nothing, recompute watched rows, compare, write it down.

Takes    a run directory and how much of it to judge.
Gives    the verdict, as a dictionary and as `verdict.json`.
Knows nothing of the command line; it is the only room that knows all others.

Letters  S positions, P positions judged, D width.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from referee.card import Card, open_device
from referee.case import Case
from referee.compare import Tally, compare
from referee.crew import Crew, count_cores
from referee.delivered import compare_delivered
from referee.errors import CannotJudge
from referee.files import hash_file, open_npy
from referee.inputs import BLOCK_POSITIONS, expect_hash, hash_row, read_row, read_run_weights
from referee.layer import Shape, block_of, count_work, run_stack
from referee.manifest import Manifest, Watched, read_manifest
from referee.progress import Progress

DEFAULT_SCORES_BYTES = 2 << 30
ENDS, DRAW_SEED = 256, 0
ROW_BYTES = 6 * 8  # per position and channel: x, q, k, v, attention and the answer


def choose_positions(count: int | None, seq_len: int) -> Tensor:
    """Ascending positions to judge: all, or the first and last 256 and the rest drawn with a fixed seed."""
    if count is None or count >= seq_len:
        return torch.arange(seq_len)
    first, last = min(ENDS, (count + 1) // 2), min(ENDS, count // 2)
    drawn = random.Random(DRAW_SEED).sample(range(first, seq_len - last), count - first - last)
    return torch.tensor([*range(first), *sorted(drawn), *range(seq_len - last, seq_len)])


def judge(
    run_dir: str | os.PathLike[str],
    *,
    case_file: Path | None = None,
    rows: Sequence[int] | None = None,
    positions: int | None = None,
    scores_bytes: int = DEFAULT_SCORES_BYTES,
    threads: int | None = None,
    device: str = "cpu",
    command: str | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Judge the watched rows of a run, or those named, and write `verdict.json` into its directory.

    With `case_file` the run must have computed that very case; without it, whatever its manifest says.

    Raises   CannotJudge, when neither pass nor fail would be honest. An earlier verdict is gone by then, unless
             it was the wish (rows, positions, memory) that could not be met.
    """
    begun_s, progress, verdict_path = time.monotonic(), Progress(quiet), Path(run_dir) / "verdict.json"
    try:
        manifest = read_manifest(Path(run_dir))
    except CannotJudge:
        if verdict_path.with_name("manifest.json").exists():
            _withdraw(verdict_path)
        raise
    case, threads = manifest.case, threads or count_cores()
    if case_file is not None:
        differences = case.differences(Case.from_toml(case_file))
        if differences:
            raise CannotJudge(
                f"the run is not of {case_file.name}: {'; '.join(differences)}",
                hint="run that case, or judge without `--case`",
            )
    watched = _choose_rows(manifest, rows)
    shape = Shape(layers=case.layers, heads=case.heads, d_model=case.d_model, ffn_dim=case.ffn_dim, causal=case.causal)
    card = None if device == "cpu" else Card(open_device(device), shape, scores_bytes)
    if card is None:
        block_of(threads, scores_bytes)
    if positions is not None and positions < 1:
        raise CannotJudge(f"{positions} positions are none to judge", hint="give 1 or more, or all")
    _withdraw(verdict_path)
    for entry in watched:  # the size of each file, before anything of that size is made
        _open_output(manifest, entry)
    valid_BS = _read_mask(manifest)
    chosen = [choose_positions(positions, entry.positions) for entry in watched]
    wanted = [_positions(entry)[chosen_P] for entry, chosen_P in zip(watched, chosen, strict=True)]
    longest = max(map(len, wanted))
    _expect_memory(ROW_BYTES * case.seq_len * case.d_model if card is None else card.host_bytes(case.seq_len, longest))
    with Crew(threads) as crew:
        weights = read_run_weights(manifest)
        for entry in watched:  # all hashes before any long work
            _check_hashes(manifest, entry, crew)
        delivered = compare_delivered(manifest, watched, progress.say)
        everything_S = torch.ones(case.seq_len, dtype=torch.bool)
        kept = [everything_S if valid_BS is None else valid_BS[entry.row] for entry in watched]
        count = functools.partial(count_work, shape) if card is None else card.count_work
        work = [
            count(int(kept_S.sum()), _places(kept_S, wanted_P)) for kept_S, wanted_P in zip(kept, wanted, strict=True)
        ]
        flops, exps = sum(flops for flops, _ in work), sum(exps for _, exps in work)
        flops_per_s, exps_per_s = crew.measure() if card is None else card.measure()
        estimated_s = flops / flops_per_s + exps / exps_per_s
        progress.say(
            f"{len(watched)} x {len(wanted[0]):,} positions of case {case.name} in float64: {flops / 1e12:,.2f} TFLOP"
            f" at {flops_per_s / 1e9:,.0f} GFLOP/s and {exps / 1e9:,.2f} G exp at {exps_per_s / 1e9:,.2f} G/s"
            f" on {f'{threads} threads' if card is None else device}, about {estimated_s:,.0f} s"
        )
        progress.start(flops)
        results: list[tuple[Watched, Tally, float]] = []

        def stack(x_SD: Tensor, picked_P: Tensor) -> Tensor:
            if card is not None:
                return card.run_stack(x_SD, picked_P, weights, progress.tick)
            return run_stack(x_SD, picked_P, weights, shape, crew, scores_bytes, progress.tick)

        try:
            for entry, kept_S, chosen_P, wanted_P in zip(watched, kept, chosen, wanted, strict=True):
                row_begun_s = time.monotonic()
                reference_PD = recompute(read_row(manifest, entry.row, crew), kept_S, wanted_P, stack)
                tally = _compare_row(manifest, entry, reference_PD, chosen_P, wanted_P, crew)
                results.append((entry, tally, time.monotonic() - row_begun_s))
                progress.say(f"row {entry.row}: {tally.verdict} after {results[-1][2]:,.1f} s")
        finally:
            progress.close()
    verdict = _write_up(manifest, results, wanted) | {
        "output": delivered,
        "wall_s": round(time.monotonic() - begun_s, 3),
        "estimated_s": round(estimated_s, 3),
        "work": {"flops": flops, "exps": exps, "flops_per_s": round(flops_per_s), "exps_per_s": round(exps_per_s)},
        "threads": threads,
        "device": device,
        "scores_bytes": scores_bytes,
        "command": command,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    _write_json(verdict_path, verdict)
    return verdict


def _expect_memory(need_bytes: int) -> None:
    available_bytes = psutil.virtual_memory().available
    if need_bytes > available_bytes:
        raise CannotJudge(
            f"a row in float64 needs {need_bytes / 2**30:,.2f} GiB, {available_bytes / 2**30:,.2f} GiB are available",
            hint="judge on a machine with more memory, or stop what else runs on this one",
        )


def _choose_rows(manifest: Manifest, rows: Sequence[int] | None) -> list[Watched]:
    there = {entry.row: entry for entry in manifest.watched}
    for row in rows or ():
        if row not in there:
            shown = ", ".join(str(known) for known in list(there)[:12]) + (", ..." if len(there) > 12 else "")
            raise CannotJudge(f"row {row} was not watched by the run", hint=f"watched rows: {shown}")
    return [there[row] for row in sorted(set(rows))] if rows else list(there.values())


def _positions(entry: Watched) -> Tensor:
    """The positions that a watched row's file holds, in its order."""
    return torch.cat([torch.arange(start, stop) for start, stop in entry.ranges])


def _places(kept_S: Tensor, wanted_P: Tensor) -> Tensor:
    """Where the wanted positions that are kept stand among all that are kept."""
    return (kept_S.cumsum(0) - 1)[wanted_P][kept_S[wanted_P]]


def recompute(x_SD: Tensor, kept_S: Tensor, wanted_P: Tensor, stack: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A row's float64 output `[P, D]` at the wanted positions: 0 at those that are not kept, the invalid ones.

    `stack` gives the output of a row without invalid positions, at picked ones.

    Exact    with no positional encoding, an invalid position that no query sees and whose output is 0 might as
             well not exist: the valid ones, close together, are a row of their own, causal order kept.
    """
    answer_PD = torch.zeros(len(wanted_P), x_SD.shape[1], dtype=torch.float64)
    places_P = _places(kept_S, wanted_P)
    if len(places_P):
        answer_PD[kept_S[wanted_P]] = stack(x_SD if kept_S.all() else x_SD[kept_S], places_P)
    return answer_PD


def _read_mask(manifest: Manifest) -> Tensor | None:
    if manifest.mask_path is None or manifest.mask_sha256 is None:
        return None
    shape = (manifest.case.batch_size, manifest.case.seq_len)
    mask_BS = open_npy(manifest.mask_path, ("|b1",), shape)
    hint = "the mask changed after the run; run again"
    expect_hash("mask.npy", hash_file(manifest.mask_path), manifest.mask_sha256, hint)
    return torch.from_numpy(np.array(mask_BS))


def _open_output(manifest: Manifest, entry: Watched) -> np.ndarray[Any, Any]:
    return open_npy(entry.output_path, ("<f4",), (entry.positions, manifest.case.d_model))


def _check_hashes(manifest: Manifest, entry: Watched, crew: Crew) -> None:
    output_SD = _open_output(manifest, entry)
    hint = "the file changed after the run; run again"
    expect_hash(entry.output_path.name, hash_row(output_SD, crew), entry.output_sha256, hint)
    hint = (
        "PyTorch does not promise the same last bit on every kind of CPU: judge on the machine of the run"
        if manifest.input_path is None
        else "the input file changed after the run; put the old one back, or run again"
    )
    x_SD = read_row(manifest, entry.row, crew)
    expect_hash(f"the input of row {entry.row}", hash_row(x_SD.numpy(), crew), entry.input_sha256, hint)


def _compare_row(
    manifest: Manifest, entry: Watched, reference_PD: Tensor, chosen_P: Tensor, wanted_P: Tensor, crew: Crew
) -> Tally:
    output_SD, case = _open_output(manifest, entry), manifest.case

    def tally(start: int) -> Tally:
        block = slice(start, start + BLOCK_POSITIONS)
        output_CD = torch.from_numpy(output_SD[chosen_P[block].numpy()])
        return compare(output_CD, reference_PD[block], wanted_P[block], entry.row, case.atol, case.rtol)

    return functools.reduce(operator.add, crew.map(tally, range(0, len(wanted_P), BLOCK_POSITIONS)))


def _write_up(
    manifest: Manifest, results: list[tuple[Watched, Tally, float]], wanted: Sequence[Tensor]
) -> dict[str, Any]:
    case, total = manifest.case, functools.reduce(operator.add, (tally for _, tally, _ in results))
    drawn = any(len(wanted_P) < entry.positions for (entry, *_), wanted_P in zip(results, wanted, strict=True))
    return {
        "schema": 1,
        "verdict": total.verdict,
        "case": asdict(case),
        "official_rule": case.official_rule,
        "positions": {"judged": min(map(len, wanted)), "of": case.seq_len, "draw_seed": DRAW_SEED if drawn else None},
        "total": total.as_json(),
        "rows": [
            {"row": entry.row, "output_sha256": entry.output_sha256, "wall_s": round(wall_s, 3), **tally.as_json()}
            for entry, tally, wall_s in results
        ],
        "watched_rows": len(manifest.watched),
        "manifest_sha256": manifest.sha256,
        "weights_sha256": manifest.weights_sha256,
    }


def _withdraw(path: Path) -> None:
    """An earlier verdict ends where a new judgement begins: it must not outlive a run that changed.

    Raises   CannotJudge.
    """
    try:
        path.unlink(missing_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"no write access to {path.parent}")
    except OSError as fault:
        hint = "make the directory writable, or copy it"
        raise CannotJudge(f"cannot write a verdict: {fault}", hint=hint) from fault


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all, and never through a link that lies in wait.

    Raises   CannotJudge.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with partial.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1, allow_nan=False) + "\n")
        partial.replace(path)
    except OSError as fault:
        partial.unlink(missing_ok=True)
        raise CannotJudge(f"cannot write {path}: {fault}", hint="make room, or make the directory writable") from fault
