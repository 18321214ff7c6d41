"""Where rows of output go: into a file, into host memory, or nowhere.

Takes    rows as they leave the pipeline, in any order, or the parts of a row, in order.
Gives    a whole file or nothing under its name; a tensor; or only the time it took to come here.
Knows nothing of how rows were made.

Shapes   B rows, S positions, D width.
"""

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch import Tensor

from frontier.case import Case
from frontier.data.hashing import hash_in_file
from frontier.data.memory import assert_holds, bytes_of, copy, poisoned, spread
from frontier.data.npy_header import npy_header
from frontier.data.reading import InputFile
from frontier.data.safetensors_header import safetensors_header
from frontier.data.writing import PartialFile
from frontier.errors import DataError, FrontierError, ResumeError
from frontier.spans import Span, cut, joined
from frontier.units import MIB

PIECE_BYTES = 16 * MIB

_HEADERS: Mapping[str, Callable[[tuple[int, ...]], bytes]] = {".npy": npy_header, ".safetensors": safetensors_header}


class RowJournal(Protocol):
    """Is told which rows are whole; may ask the sink for hashes and syncs until it is closed."""

    def add(self, rows: Span) -> None: ...

    def close(self) -> None: ...


class FileSink:
    """One float32 `[B, S, D]` array in a file. It bears its name only when every row is in it.

    `claimed` is what the journal of a killed run says of each finished row, if it is to be gone on with: empty
    means that a part is there or not, and nothing in it counts, unless a row was `begun`.

    Raises   DataError if the name is taken (unless `overwrite`), another run writes it, or the disk is too small;
             ResumeError if the part with the claimed rows is not there.
    """

    def __init__(
        self,
        path: str | Path,
        case: Case,
        overwrite: bool = False,
        threads: int = 4,
        claimed: Mapping[int, str] | None = None,
        begun: bool = False,
    ) -> None:
        self.path = Path(path)
        self._case = case
        self._file = PartialFile(
            path,
            _header(self.path, case),
            case.input_bytes,
            overwrite=overwrite,
            part="refuse" if claimed is None else "keep" if claimed or begun else "replace",
        )
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="write")
        self.claimed = dict(claimed or {})
        self.is_finished, self._begun = False, begun
        self.whole_rows = set(self.claimed)
        self._journal: RowJournal | None = None

    def tell(self, journal: RowJournal) -> None:
        """Name rows to `journal` as soon as they are whole; it is closed before the file is."""
        self._journal = journal

    def write(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Put `rows`, or a part of one row, in their place in the file.

        Raises   DataError if the disk is full or fails.
        """
        assert_holds(host_BSD, rows, self._case, positions)
        data = bytes_of(host_BSD)
        row_bytes, first_position = self._case.row_bytes, positions.start if positions else 0
        begin_bytes = rows.start * row_bytes + first_position * (row_bytes // self._case.seq_len)
        self.whole_rows.difference_update(range(*rows))
        self._file.write_header()
        spread(
            self._pool,
            lambda piece: self._file.write(data[piece.as_slice()], begin_bytes + piece.start),
            cut(len(data), PIECE_BYTES),
        )
        if positions is None or positions.stop == self._case.seq_len:
            self.whole_rows.update(range(*rows))
            if self._journal is not None:
                self._journal.add(rows)

    @property
    def is_whole(self) -> bool:
        """Whether the run that was killed had already given the file its name."""
        return self._file.is_whole

    def keep_begun(self) -> None:
        """From now on the part is to be kept, though no row may be whole: one is under way that can be gone on with."""
        self._file.write_header()
        self._begun = True

    def sync(self) -> None:
        """Bring all that was written so far to the disk.

        Raises   DataError if the disk fails.
        """
        self._file.sync()

    def row_hash(self, row: int) -> str:
        """The hash of what lies in the file where a row is."""
        return hash_in_file(row, self._case, self._file.read_into, self._pool)

    def forget(self, rows: Collection[int]) -> None:
        """These of the claimed rows count as never written from now on."""
        for row in rows:
            del self.claimed[row]
        self.whole_rows.difference_update(rows)

    def read_row(self, row: int, into: Tensor, begin_bytes: int = 0) -> None:
        """Fill `into` with a row that is whole, or with what was written of it from `begin_bytes` on."""
        self._file.read_into(bytes_of(into), row * self._case.row_bytes + begin_bytes)

    def finish(self) -> None:
        """Bring the file to the disk and give it its name.

        Raises   DataError if a row was never written, the disk fails, or the name was taken meanwhile.
        """
        if len(self.whole_rows) < self._case.batch_size:
            raise DataError(
                f"{self.path} is not whole: {self._describe_rows()}",
                hint="run again; rows that are whole stay where they are until then",
            )
        if self._journal is not None:
            self._journal.close()
        self._file.commit()
        self.is_finished = True
        self._pool.shutdown()

    def abandon(self) -> str:
        """Close the part and keep it, unless nothing is in it; say which. After `finish` the output stays."""
        if self._journal is not None:
            with suppress(FrontierError):  # an earlier error is on its way
                self._journal.close()
        self._pool.shutdown()
        if self.is_finished or self.is_whole:
            self._file.close()
            return f"{self.path.name} is whole"
        if not self.whole_rows and not self._begun:
            self._file.discard()
            return f"no row is whole, {self._file.partial.name} is removed"
        self._file.close()
        return self._describe_rows()

    def _describe_rows(self) -> str:
        spans = joined(self.whole_rows)
        texts = [f"{span.start}-{span.stop - 1}" if len(span) > 1 else f"{span.start}" for span in spans]
        subject, verb = ("rows", "are") if len(self.whole_rows) > 1 else ("row", "is")
        rows = f"{subject} {', '.join(texts)}" if texts else "no row"
        return f"{rows} of {self._case.batch_size} {verb} whole in {self._file.partial.name}"


class FinishedFile:
    """An output under its own name, looked at once more and never changed.

    Raises   DataError if it cannot be read; ResumeError if it is not of the header and size that its run gave it.
    """

    def __init__(self, path: str | Path, case: Case, threads: int) -> None:
        self._case, header = case, _header(Path(path), case)
        self._file = InputFile(path)
        found_bytes, wanted_bytes = self._file.size_bytes, len(header) + case.input_bytes
        if found_bytes != wanted_bytes or self._file.head(len(header)) != header:
            self._file.close()
            raise ResumeError(f"{path} has {found_bytes:,} bytes, {wanted_bytes:,} with the header of its run expected")
        self._begin_bytes = len(header)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")

    def row_hash(self, row: int) -> str:
        """The hash of what lies in the file where a row is."""
        return hash_in_file(
            row, self._case, lambda into, at_bytes: self._file.read_into(into, self._begin_bytes + at_bytes), self._pool
        )

    def close(self) -> None:
        """Let go of file and threads."""
        self._pool.shutdown()
        self._file.close()


def _header(path: Path, case: Case) -> bytes:
    if path.suffix not in _HEADERS:
        raise DataError(
            f"{path} ends in `{path.suffix}`, an output ends in {' or '.join(_HEADERS)}",
            hint=f"name it {path.stem}.npy",
        )
    return _HEADERS[path.suffix]((case.batch_size, case.seq_len, case.d_model))


def place_of(path: str | Path) -> str:
    """Where an output lies when it is whole: a link in its place is replaced then, not followed."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


class MemorySink:
    """All rows in `host_BSD`; a row that was never written is NaN."""

    def __init__(self, case: Case, threads: int = 4) -> None:
        self._case = case
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keep")
        self.host_BSD = poisoned(self._pool, case.batch_size, case.seq_len, case.d_model)

    def write(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        assert_holds(host_BSD, rows, self._case, positions)
        within = positions or Span(0, self._case.seq_len)
        copy(self._pool, self.host_BSD[rows.as_slice(), within.as_slice()], host_BSD)

    def finish(self) -> None:
        """Nothing is left to do: another pass may write the rows again."""

    def abandon(self) -> str:
        return "the output was in memory and is gone"


class NullSink:
    """Takes every row and keeps none, for measuring."""

    def write(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Forget `rows`."""

    def finish(self) -> None:
        """Nothing was kept."""

    def abandon(self) -> str:
        return "no output was kept"
