"""Where rows of output go: into an .npy file, into host memory, or nowhere.

Takes    rows as they leave the pipeline, in any order.
Gives    a whole file or nothing under its name; a tensor; or only the time it took to come here.
Knows nothing of how rows were made.

Shapes   B rows, S positions, D width.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from frontier.case import Case
from frontier.data.memory import assert_holds, bytes_of, copy, poisoned, spread
from frontier.data.writing import PartialNpy
from frontier.errors import DataError
from frontier.spans import Span, cut
from frontier.units import MIB

PIECE_BYTES = 16 * MIB


class NpySink:
    """One float32 `[B, S, D]` file. It bears its name only when every row is in it.

    Raises   DataError if the name is taken (unless `overwrite`), another run writes it, or the disk is too small.
    """

    def __init__(self, path: str | Path, case: Case, overwrite: bool = False, threads: int = 4) -> None:
        self._case = case
        self._file = PartialNpy(path, (case.batch_size, case.seq_len, case.d_model), overwrite=overwrite)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")
        self._whole_rows: set[int] = set()
        self._finished = False

    def write(self, rows: Span, host_BSD: Tensor) -> None:
        """Put `rows` in their place in the file.

        Raises   DataError if the disk is full or fails.
        """
        assert_holds(host_BSD, rows, self._case)
        data = bytes_of(host_BSD)
        begin_bytes = rows.start * self._case.row_bytes
        self._whole_rows.difference_update(range(*rows))
        spread(
            self._pool,
            lambda piece: self._file.write(data[piece.as_slice()], begin_bytes + piece.start),
            cut(len(data), PIECE_BYTES),
        )
        self._whole_rows.update(range(*rows))

    def finish(self) -> None:
        """Bring the file to the disk and give it its name.

        Raises   DataError if a row was never written, the disk fails, or the name was taken meanwhile.
        """
        if len(self._whole_rows) < self._case.batch_size:
            raise DataError(
                f"{self._file.path} is not whole: {self._describe_rows()}",
                hint="run again; rows that are whole stay where they are until then",
            )
        self._file.commit()
        self._finished = True
        self._pool.shutdown()

    def abandon(self) -> str:
        """Close the part and keep it, unless nothing is in it; say which. After `finish` the output stays."""
        self._pool.shutdown()
        if self._finished:
            return f"{self._file.path.name} is whole"
        if not self._whole_rows:
            self._file.discard()
            return f"no row is whole, {self._file.partial.name} is removed"
        self._file.close()
        return self._describe_rows()

    def _describe_rows(self) -> str:
        spans: list[Span] = []
        for row in sorted(self._whole_rows):
            if spans and spans[-1].stop == row:
                spans[-1] = Span(spans[-1].start, row + 1)
            else:
                spans.append(Span(row, row + 1))
        texts = [f"{span.start}-{span.stop - 1}" if len(span) > 1 else f"{span.start}" for span in spans]
        subject, verb = ("rows", "are") if len(self._whole_rows) > 1 else ("row", "is")
        rows = f"{subject} {', '.join(texts)}" if texts else "no row"
        return f"{rows} of {self._case.batch_size} {verb} whole in {self._file.partial.name}"


class MemorySink:
    """All rows in `host_BSD`; a row that was never written is NaN."""

    def __init__(self, case: Case, threads: int = 4) -> None:
        self._case = case
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keep")
        self.host_BSD = poisoned(self._pool, case.batch_size, case.seq_len, case.d_model)

    def write(self, rows: Span, host_BSD: Tensor) -> None:
        assert_holds(host_BSD, rows, self._case)
        copy(self._pool, self.host_BSD[rows.as_slice()], host_BSD)

    def finish(self) -> None:
        """Nothing is left to do: another pass may write the rows again."""

    def abandon(self) -> str:
        return "the output was in memory and is gone"


class NullSink:
    """Takes every row and keeps none, for measuring."""

    def write(self, rows: Span, host_BSD: Tensor) -> None:
        """Forget `rows`."""

    def finish(self) -> None:
        """Nothing was kept."""

    def abandon(self) -> str:
        return "no output was kept"
