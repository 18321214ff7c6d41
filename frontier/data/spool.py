"""Bytes written once and read back often: keys and values of a row that the card cannot hold.

Takes    a size; contiguous host tensors, each at a place of its own.
Gives    the same bytes, from host memory or from a file, which has a name only if it may outlive the run.
Knows nothing of rows, layers or chunks.
"""

import mmap
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from frontier.data.memory import bytes_of, spread
from frontier.errors import DataError, DoesNotFit
from frontier.spans import Span, cut
from frontier.units import MIB, show_bytes

# Eight threads then share a chunk of 64 MiB; one thread copies 13.6 GB/s, a link takes 55 (H200 host).
PIECE_BYTES = 4 * MIB


class Spool(Protocol):
    def keep(self, at_bytes: int, host: Tensor) -> None:
        """Copy a contiguous tensor to its place. It may be reused as soon as this returns."""

    def fetch(self, at_bytes: int, into: Tensor) -> None:
        """Fill a contiguous tensor from a place that was kept."""

    def close(self) -> None:
        """Give the memory or the file back."""


class MemorySpool:
    """Host memory, taken as it is first written.

    Raises   DoesNotFit if the system will not give that much.
    """

    def __init__(self, num_bytes: int, threads: int) -> None:
        try:
            # Private: shared memory gets no huge pages where the system keeps them from its shmem.
            self._pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as reason:
            raise DoesNotFit(
                f"the system refuses {show_bytes(num_bytes)} of host memory for keys and values: {reason}",
                hint="lower --host-budget, so that they go to a file; or raise `ulimit -v`",
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):  # faulted several times faster; a kernel without them says no
            with suppress(OSError):
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._held = np.frombuffer(self._pages, dtype=np.uint8)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spool")

    def keep(self, at_bytes: int, host: Tensor) -> None:
        self._copy(self._held[at_bytes : at_bytes + host.nbytes], np.frombuffer(bytes_of(host), np.uint8))

    def fetch(self, at_bytes: int, into: Tensor) -> None:
        self._copy(np.frombuffer(bytes_of(into), np.uint8), self._held[at_bytes : at_bytes + into.nbytes])

    def close(self) -> None:
        self._pool.shutdown()

    def _copy(self, into: NDArray[np.uint8], held: NDArray[np.uint8]) -> None:
        assert len(into) == len(held), (len(into), len(held))
        spread(
            self._pool,
            lambda piece: np.copyto(into[piece.as_slice()], held[piece.as_slice()]),
            cut(len(into), PIECE_BYTES),
        )


class FileSpool:
    """A file in a folder `place` that has no name, so that nothing is left of it however the run ends. Or one of the
    name `place`, as it is if it has the right size; the name stays if the file was there or `is_kept`.

    Raises   DataError if the folder cannot hold it, before anything is computed; later if the disk fails.
    """

    def __init__(self, place: Path, num_bytes: int, threads: int) -> None:
        self.name = None if place.is_dir() else place
        self._folder = folder = place if self.name is None else place.parent
        self.is_new, self.is_kept = True, False
        try:
            if self.name is None:
                self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="spool-")  # noqa: SIM115  # `close`
            else:
                self._file = os.fdopen(self._take(self.name, max(1, num_bytes)), "r+b")
            try:
                os.posix_fallocate(self._file.fileno(), 0, max(1, num_bytes))
            except BaseException:
                self._file.close()
                self.drop(unless_kept=True)
                raise
        except OSError as reason:
            raise DataError(
                f"{folder} cannot hold {show_bytes(num_bytes)} of keys and values: {reason.strerror}",
                hint="free space, raise --host-budget so that they stay in memory, or name another --run-dir",
            ) from None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spool")

    def keep(self, at_bytes: int, host: Tensor) -> None:
        data = bytes_of(host)

        def write_piece(piece: Span) -> None:
            done_bytes = piece.start
            while done_bytes < piece.stop:
                done_bytes += os.pwrite(self._file.fileno(), data[done_bytes : piece.stop], at_bytes + done_bytes)

        self._in_pieces(write_piece, len(data))

    def fetch(self, at_bytes: int, into: Tensor) -> None:
        data = bytes_of(into)

        def read_piece(piece: Span) -> None:
            done_bytes = piece.start
            while done_bytes < piece.stop:
                got_bytes = os.preadv(self._file.fileno(), [data[done_bytes : piece.stop]], at_bytes + done_bytes)
                assert got_bytes, (at_bytes, piece)  # the whole file was reserved
                done_bytes += got_bytes

        self._in_pieces(read_piece, len(data))

    def sync(self) -> None:
        """Bring all that was kept to the disk. Raises DataError if the disk fails."""
        self._in_pieces(lambda piece: os.fdatasync(self._file.fileno()), 1)

    def drop(self, unless_kept: bool = False) -> None:
        """Take the name away: nothing in the file counts any more."""
        if self.name is not None and not (unless_kept and self.is_kept):
            self.name.unlink(missing_ok=True)

    def close(self) -> None:
        self._pool.shutdown()
        self._file.close()
        self.drop(unless_kept=True)

    def _take(self, name: Path, num_bytes: int) -> int:
        """The file of that name if it is one of that size, else a new one; never what a link leads to."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError):
            fd = os.open(name, flags)
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_size == num_bytes:
                self.is_new, self.is_kept = False, True
                return fd
            os.close(fd)
        self.drop()
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666)

    def _in_pieces(self, work: Callable[[Span], None], num_bytes: int) -> None:
        try:
            spread(self._pool, work, cut(num_bytes, PIECE_BYTES))
        except OSError as reason:
            raise DataError(
                f"the keys and values spooled in {self._folder} cannot be kept: {reason.strerror}",
                hint="name a --run-dir on a sound disk",
            ) from None
