"""Tables in Markdown, and the forms that numbers take in them.

Takes    rows and columns.
Gives    text.
Knows nothing of what they mean.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from frontier.record import Record
from frontier.units import GIB

Item = TypeVar("Item")
Column = tuple[str, Callable[[Item], str]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell may hold any text."""
    lines = [head, ["---"] * len(head), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_columns(items: Iterable[Item], columns: Sequence[Column[Item]]) -> str:
    """A row for each item, a column for each (title, how to show it)."""
    return table([name for name, _ in columns], [[show(item) for _, show in columns] for item in items])


def gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def share(peak: int | None, planned: int | None) -> str:
    return f"{peak / planned:.1%}" if peak and planned else ""


def name_of(record: Record) -> str:
    return str(record.notes.get("name") or record.case["name"])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
