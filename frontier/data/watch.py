"""Keeps what a judge will ask about: hashes of watched input rows, and the same rows of output.

Takes    rows on their way in and out.
Gives    the manifest's "watched" entries and the files they name (contract section 6).
Knows nothing of how a row is judged.

Shapes   B rows, S positions, D width.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.data.hashing import RowHash, row_hash
from frontier.data.memory import assert_holds, bytes_of, copy, poisoned
from frontier.data.npy_header import npy_header
from frontier.data.protocols import Source
from frontier.data.writing import PartialFile
from frontier.errors import DataError
from frontier.spans import Span

_SHOWN_DIGITS = 12


class Watcher:
    """Watches some rows through every pass; its memory, `case.row_bytes` a row, is taken and touched when made.

    The threads that call it must not be threads of `pool`.

    Raises   CaseError if the case has no such row.
    """

    def __init__(self, case: Case, watched: tuple[int, ...], pool: Executor) -> None:
        case.check_watched(watched)
        self._case = case
        self._pool = pool
        self._watched = sorted(set(watched))
        self._input_hashes: dict[int, str] = {}
        self._hashing: dict[int, RowHash] = {}
        self._outputs_SD = {row: poisoned(pool, case.seq_len, case.d_model) for row in self._watched}
        self._seen_outputs: set[int] = set()

    def saw_input(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Hash the watched among `rows`, or the next part of a watched row.

        Raises   DataError if a row is not what it was in an earlier pass.
        """
        within = positions or Span(0, self._case.seq_len)
        for row, host_SD in self._watched_in(rows, host_BSD, positions):
            if within.start == 0:
                self._hashing[row] = RowHash(self._pool)
            self._hashing[row].add(host_SD)
            if within.stop < self._case.seq_len:
                continue
            now = self._hashing.pop(row).hexdigest()
            before = self._input_hashes.setdefault(row, now)
            if now != before:
                raise DataError(
                    f"input row {row} changed between two passes: its hash was {before[:_SHOWN_DIGITS]}… "
                    f"and is {now[:_SHOWN_DIGITS]}…",
                    hint="run again on an input that nothing else writes to; if it is seeded, test the host's memory",
                )

    def saw_output(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Keep a copy of the watched among `rows`, or of a part of a watched row; a later pass replaces it."""
        within = positions or Span(0, self._case.seq_len)
        for row, host_SD in self._watched_in(rows, host_BSD, positions):
            copy(self._pool, self._outputs_SD[row][within.as_slice()], host_SD)
            if within.stop == self._case.seq_len:
                self._seen_outputs.add(row)

    def recall(
        self, seen: Mapping[int, tuple[int, int]], source: Source, read_row: Callable[[int, Tensor], None]
    ) -> None:
        """See again, in their source and their sink, the first positions of watched rows that an earlier start of this
        run has read and has written, so many of a row."""
        for row in (row for row in self._watched if row in seen):
            (num_in, num_out), rows, host_SD = seen[row], Span(row, row + 1), self._outputs_SD[row]
            if num_in:
                source.read(rows, host_SD[None, :num_in], Span(0, num_in))
                self.saw_input(rows, host_SD[None, :num_in], Span(0, num_in))
                host_SD[:num_in].fill_(torch.nan)
                read_row(row, host_SD[:num_out])
            if num_out == self._case.seq_len:
                self._seen_outputs.add(row)

    def save(self, run_dir: Path) -> list[dict[str, Any]]:
        """Write the rows that came out, and return the entries of those that were seen going in and coming out.

        Raises   DataError if the run directory cannot hold them.
        """
        directory = run_dir / "watched"
        try:
            directory.mkdir(exist_ok=True)
        except OSError as reason:
            raise DataError(
                f"{directory} cannot be made: {reason.strerror}", hint="name another run directory"
            ) from None
        entries = []
        for row in sorted(self._seen_outputs & self._input_hashes.keys()):
            output = f"watched/row_{row:08d}.npy"
            host_SD = self._outputs_SD[row]
            file = PartialFile(run_dir / output, npy_header(tuple(host_SD.shape)), host_SD.nbytes, overwrite=True)
            try:
                file.write_header()
                file.write(bytes_of(host_SD), 0)
                file.commit()
            except BaseException:
                file.discard()
                raise
            entries.append(
                {
                    "row": row,
                    "input_sha256": self._input_hashes[row],
                    "output": output,
                    "output_sha256": row_hash(host_SD, self._pool),
                }
            )
        return entries

    def _watched_in(self, rows: Span, host_BSD: Tensor, positions: Span | None) -> Iterator[tuple[int, Tensor]]:
        assert_holds(host_BSD, rows, self._case, positions)
        for row in self._watched:
            if rows.start <= row < rows.stop:
                yield row, host_BSD[row - rows.start]
