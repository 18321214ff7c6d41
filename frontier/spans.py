"""Half-open ranges `[start, stop)`, and cutting a total into them.

Takes    a total and a size.
Gives    spans, in order.
Knows nothing of rows, positions or ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """The whole numbers from `start` up to, not including, `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def as_slice(self) -> slice:
        """For indexing a tensor or array."""
        return slice(self.start, self.stop)


def cut(total: int, size: int) -> Iterator[Span]:
    """`[0, total)` in spans of `size`; the last may be shorter."""
    assert total >= 0 and size > 0, (total, size)
    for start in range(0, total, size):
        yield Span(start, min(start + size, total))
