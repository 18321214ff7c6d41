"""What the stream may ask of a source and of a sink.

Takes    nothing.
Gives    two protocols, which every source and sink of this room meets.
Knows nothing of files.

Shapes   B rows, S positions, D width.
"""

from typing import Any, Protocol

from torch import Tensor

from frontier.spans import Span


class Source(Protocol):
    """Rows of input, by number. Reading a row twice gives the same bytes."""

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        """Fill `into_BSD`, contiguous float32 on the host and perhaps pinned, with `rows`, or a part of one row."""

    def describe(self) -> dict[str, Any]:
        """The manifest's "input" entry (contract section 6)."""

    def close(self) -> None:
        """Let go of files and threads; say so if the input is no longer what was read."""


class Sink(Protocol):
    """Takes rows of output, in any order, each once per pass; the parts of one row from its first to its last."""

    def write(self, rows: Span, host_BSD: Tensor, positions: Span | None = None) -> None:
        """Keep `rows`, or a part of one row. The tensor may be reused as soon as this returns."""

    def finish(self) -> None:
        """All rows are here: give the output its final name."""

    def abandon(self) -> str:
        """Stop early, and say in one sentence what is safe and where."""
