"""Keeps what a judge will ask about: hashes of watched input rows, and the same rows of output.

Takes    rows on their way in and out.
Gives    the manifest's "watched" entries and the files they name (contract section 6).
Knows nothing of how a row is judged.

Shapes   B rows, S positions, D width.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from torch import Tensor

from frontier.case import Case
from frontier.data.hashing import row_hash
from frontier.data.memory import assert_holds, bytes_of, copy, poisoned
from frontier.data.writing import PartialNpy
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
        self._outputs_SD = {row: poisoned(pool, case.seq_len, case.d_model) for row in self._watched}
        self._seen_outputs: set[int] = set()

    def saw_input(self, rows: Span, host_BSD: Tensor) -> None:
        """Hash the watched among `rows`.

        Raises   DataError if a row is not what it was in an earlier pass.
        """
        for row, host_SD in self._watched_in(rows, host_BSD):
            now = row_hash(host_SD, self._pool)
            before = self._input_hashes.setdefault(row, now)
            if now != before:
                raise DataError(
                    f"input row {row} changed between two passes: its hash was {before[:_SHOWN_DIGITS]}… "
                    f"and is {now[:_SHOWN_DIGITS]}…",
                    hint="run again on an input that nothing else writes to; if it is seeded, test the host's memory",
                )

    def saw_output(self, rows: Span, host_BSD: Tensor) -> None:
        """Keep a copy of the watched among `rows`; a later pass replaces it."""
        for row, host_SD in self._watched_in(rows, host_BSD):
            copy(self._pool, self._outputs_SD[row], host_SD)
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
            file = PartialNpy(run_dir / output, tuple(host_SD.shape), overwrite=True)
            try:
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

    def _watched_in(self, rows: Span, host_BSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        assert_holds(host_BSD, rows, self._case)
        for row in self._watched:
            if rows.start <= row < rows.stop:
                yield row, host_BSD[row - rows.start]
