"""Rows through pipes: raw little-endian float32 from standard input and to standard output, row by row.

Takes    a file descriptor that gives or takes each byte once, in order.
Gives    a source that can be read once; a sink that can be written once.
Knows nothing of headers or of the program at the other end.

Shapes   B rows, S positions, D width.
"""

import contextlib
import fcntl
import functools
import os
import select
import signal
import stat
import time
from typing import Any

from torch import Tensor

from frontier.case import Case
from frontier.data.memory import assert_holds, bytes_of
from frontier.errors import DataError
from frontier.spans import Span
from frontier.units import MIB

# So much can be written to a pipe that is ready without waiting for the reader (POSIX's PIPE_BUF on Linux).
_READY_BYTES = 4096


@functools.cache
def _signals_fd() -> int:
    """A descriptor that can be read as soon as a signal came, for the life of the process."""
    come_fd, go_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(ValueError):  # only the main thread gets signals; any other cannot be stopped so
        signal.set_wakeup_fd(go_fd, warn_on_full_buffer=False)
    return come_fd


class _Pipe:
    """A descriptor whose next bytes are those of the next position; waiting for it ends when a signal comes.

    A thread that waits for another program would keep the run from ending: whoever stops the run may stop only us.
    """

    def __init__(self, fd: int, case: Case) -> None:
        self.fd, self.case = fd, case
        self.can_block = not stat.S_ISREG(os.fstat(fd).st_mode)
        self.done_positions = 0
        with contextlib.suppress(BlockingIOError):  # what came before we began
            os.read(_signals_fd(), MIB)
        with contextlib.suppress(OSError):  # it is no pipe, or larger ones are not allowed
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, MIB)

    def take_turn(self, rows: Span, positions: Span | None, host_BSD: Tensor) -> memoryview:
        """The bytes of these rows, if it is their turn."""
        assert_holds(host_BSD, rows, self.case, positions)
        first = rows.start * self.case.seq_len + (positions.start if positions else 0)
        if first != self.done_positions:
            raise DataError(
                f"a pipe passes each row once: position {self.done_positions:,} of the batch is next, "
                f"{first:,} was asked for",
                hint="use --resident to keep the input, or a file",
            )
        self.done_positions += len(rows) * (len(positions) if positions else self.case.seq_len)
        return bytes_of(host_BSD)

    def wait(self, *, to_write: bool) -> None:
        """Until the other end is ready.

        Raises   KeyboardInterrupt when a signal came, a little after the main thread's own handler has raised.
        """
        if self.can_block:
            reads, writes = ([_signals_fd()], [self.fd]) if to_write else ([_signals_fd(), self.fd], [])
            if _signals_fd() in select.select(reads, writes, [])[0]:
                time.sleep(0.1)
                raise KeyboardInterrupt


class PipeSource:
    """All rows of a case, in order, each once."""

    def __init__(self, fd: int, case: Case) -> None:
        self._pipe = _Pipe(fd, case)

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        """Fill `into_BSD` with the next rows, or the next part of a row.

        Raises   DataError if the input ends first, or these are not the next.
        """
        into = self._pipe.take_turn(rows, positions, into_BSD)
        done_bytes = 0
        while done_bytes < len(into):
            self._pipe.wait(to_write=False)
            got_bytes = os.readv(self._pipe.fd, [into[done_bytes:]])
            if not got_bytes:
                raise DataError(
                    f"standard input ended in row {rows.start + done_bytes // self._pipe.case.row_bytes}: "
                    f"{self._pipe.case.batch_size} rows, {self._pipe.case.input_bytes:,} bytes, expected",
                    hint="send every row as float32, without a header",
                )
            done_bytes += got_bytes

    def describe(self) -> dict[str, Any]:
        return {"kind": "stream"}

    def close(self) -> None:
        """Let go of the input, which the caller opened.

        Raises   DataError if all rows came and more is there already: it was another case's, or had a header.
        """
        pipe = self._pipe
        came_whole = pipe.done_positions == pipe.case.batch_size * pipe.case.seq_len
        if came_whole and select.select([pipe.fd], [], [], 0)[0] and os.read(pipe.fd, 1):
            raise DataError(
                f"standard input goes on behind its {pipe.case.input_bytes:,} bytes",
                hint="send float32 of the case's shape, without a header",
            )


class PipeSink:
    """All rows of a case, in order, each once."""

    def __init__(self, fd: int, case: Case) -> None:
        self._pipe = _Pipe(fd, case)

    def write(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Send the next rows, or the next part of a row.

        Raises   DataError if nobody reads any more, or these are not the next.
        """
        data = self._pipe.take_turn(rows, positions, host_BSD)
        done_bytes, most_bytes = 0, _READY_BYTES if self._pipe.can_block else 16 * MIB
        while done_bytes < len(data):
            self._pipe.wait(to_write=True)
            try:
                done_bytes += os.write(self._pipe.fd, data[done_bytes : done_bytes + most_bytes])
            except OSError as reason:
                raise DataError(
                    f"standard output cannot be written in row {rows.start}: {reason.strerror}",
                    hint="look why the reading program ended",
                ) from None

    def finish(self) -> None:
        """Nothing is left to do: the pipe has it all."""

    def abandon(self) -> str:
        """Say how much went out; it cannot be called back."""
        return f"{self._pipe.done_positions // self._pipe.case.seq_len} rows at most went to standard output"
