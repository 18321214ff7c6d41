"""The output file that a run handed over, held bit by bit against the rows that it kept for the judge.

Takes    a checked manifest, the watched rows to judge, a way to talk.
Gives    "compared", or "missing" or "none" where there is no file to look at; a refusal where a bit differs.
Knows nothing of the formula, of tolerances or of verdicts.

Letters  P positions of a piece, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from referee.errors import CannotJudge
from referee.files import open_npy, open_output
from referee.manifest import Manifest, Watched

PIECE_POSITIONS = 4096


def compare_delivered(manifest: Manifest, watched: Sequence[Watched], say: Callable[[str], None]) -> str:
    """Whether the output file was looked at; each bit of its watched rows is then as the run kept it.

    Raises   CannotJudge, naming the first place that differs, or when the file is damaged or of another shape.
    """
    path, case = manifest.output_path, manifest.case
    if path is None:
        return "none"
    if not _is_there(path):
        say(f"the run's output {path} is not there: the rows that were kept of it are judged alone")
        return "missing"
    with open_output(path, (case.batch_size, case.seq_len, case.d_model)) as read:
        for entry in watched:
            kept_SD = open_npy(entry.output_path, ("<f4",), (entry.positions, case.d_model))
            begin = 0
            for start, stop in _pieces(entry):
                kept_PD = kept_SD[begin : begin + stop - start]
                _expect_same_bits(path, entry.row, start, read(entry.row, start, stop), kept_PD)
                begin += stop - start
    return "compared"


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError) as fault:
        hint = "let the referee read there, or judge a copy of the run whose manifest names no output"
        raise CannotJudge(
            f"the run's output {str(path)!r:.200} cannot be looked at: {fault!s:.100}", hint=hint
        ) from fault


def _pieces(entry: Watched) -> Iterator[tuple[int, int]]:
    for start, stop in entry.ranges:
        yield from ((at, min(at + PIECE_POSITIONS, stop)) for at in range(start, stop, PIECE_POSITIONS))


def _expect_same_bits(
    path: Path, row: int, first: int, found_PD: np.ndarray[Any, Any], kept_PD: np.ndarray[Any, Any]
) -> None:
    differs_PD = found_PD.view("<u4") != kept_PD.view("<u4")
    if differs_PD.any():
        place, channel = divmod(int(differs_PD.argmax()), differs_PD.shape[1])
        found, kept = (
            f"{half[place, channel]:.9g} (bits {half.view('<u4')[place, channel]:08x})" for half in (found_PD, kept_PD)
        )
        raise CannotJudge(
            f"row {row} of {path.name} is not what the run kept of it, first at position {first + place} "
            f"channel {channel}: the file holds {found}, the run kept {kept}",
            hint=f"{path} changed after the run, or is another run's by now: put the right file back, or run again",
        )
