"""Half-open ranges `[start, stop)`, and cutting a total into them.

Takes    a total and a size.
Gives    spans, in order.
Knows nothing of rows, positions or ranks.
"""

from collections.abc import Container, Iterable, Iterator
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

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}"

    # What the stream asks of all that it carries; a step of a chunked row says something else.

    @property
    def up(self) -> int:
        """Rows of a slot that are read and uploaded."""
        return len(self)

    @property
    def down(self) -> int:
        """Rows of a slot that come down and are written."""
        return len(self)

    @property
    def after(self) -> int | None:
        """The trip, counted from 0, whose write must have ended before this one is read."""
        return None


def cut(total: int, size: int) -> Iterator[Span]:
    """`[0, total)` in spans of `size`; the last may be shorter."""
    assert total >= 0 and size > 0, (total, size)
    for start in range(0, total, size):
        yield Span(start, min(start + size, total))


def even_lengths(total: int, longest: int, shortest: int) -> list[int]:
    """Lengths that cut `total` evenly, falling from `longest` to `shortest`; multiples of it where no crumb is left.

    A last crumb of a row would wait for every key before it, and do little with each.
    """
    lengths: list[int] = []
    count = -(-total // longest)
    while (even := -(-total // count)) >= shortest or not lengths:
        rounded = min(longest, -(-even // shortest) * shortest)
        lengths.append(rounded if 2 * count * (rounded - even) < even else even)
        count = max(count + 1, count * 5 // 4)
    return lengths


def joined(numbers: Iterable[int]) -> list[Span]:
    """Whole numbers as the fewest spans, in order."""
    spans: list[Span] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1].stop == number:
            spans[-1] = Span(spans[-1].start, number + 1)
        else:
            spans.append(Span(number, number + 1))
    return spans


def without(spans: Iterable[Span], done: Container[int]) -> Iterator[Span]:
    """What is left of each span when the numbers in `done` are taken out."""
    for span in spans:
        yield from joined(number for number in range(*span) if number not in done)
