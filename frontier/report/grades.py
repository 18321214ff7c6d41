"""The section of RESULTS.md on grades: what the benchmark script itself said of the drop-in.

Takes    the records of one machine.
Gives    Markdown: a row a grade, and geometric means of the speedups that passed.
Knows nothing of how the script was run.
"""

import math
import statistics
from collections.abc import Callable, Iterator

from frontier.case import shipped_names
from frontier.record import Record
from frontier.report.tables import Column, with_columns


def sections(records: list[Record]) -> Iterator[str]:
    """Markdown of what was graded on one machine; nothing where nothing was."""
    grades = [r for r in records if r.kind == "grade"]
    if grades:
        yield "### Graded by the benchmark script"
        yield with_columns(grades, _COLUMNS)
        yield from _mean(grades)


def _mean(grades: list[Record]) -> Iterator[str]:
    """Of the medians of each shipped case without options of its own, a commit: one tells nothing of another's.

    Nothing of a commit unless all in-core cases passed there.
    """
    for commit in dict.fromkeys(record.commit for record in grades):
        speedups: dict[str, list[float]] = {}
        for record in grades:
            passed = record.verdicts["script"]["verdict"] == "pass" and not record.notes.get("options")
            if record.commit == commit and passed:
                speedups.setdefault(str(record.case["name"]), []).append(record.notes["speedup"])
        if set(speedups) >= set(shipped_names()[:-1]):
            medians = [statistics.median(speedups[name]) for name in shipped_names()[:-1]]
            mean = math.prod(medians) ** (1 / len(medians))
            yield f"Geometric mean of the speedups at `{(commit or 'unknown')[:12]}`: **{mean:.2f} x**."


def _grade(key: str, part: str, form: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = record.notes.get(key)
        value = value.get(part) if part and value else value
        return "" if value is None else format(value, form)

    return show


_COLUMNS: tuple[Column[Record], ...] = (
    ("case", lambda r: str(r.case["name"])),
    ("verdict", lambda r: str(r.verdicts["script"]["verdict"])),
    ("baseline ms", _grade("baseline_ms", "p50", ".4f")),
    ("ours ms", _grade("optimized_ms", "p50", ".4f")),
    ("speedup", _grade("speedup", "", ".2f")),
    ("ran", lambda r: f"`{r.recipe}`"),
    ("commit", lambda r: f"`{(r.commit or 'unknown')[:12]}`"),
    ("options", lambda r: str(r.notes.get("options") or "")),
    ("reason", lambda r: str(r.notes.get("reason") or "")),
)
