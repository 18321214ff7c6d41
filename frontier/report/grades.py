"""The section of RESULTS.md on grades: what the benchmark script itself said of the drop-in.

Takes    the records of one machine.
Gives    Markdown: a row a grade; medians of a commit's runs, and geometric means of the speedups that passed.
Knows nothing of how the script was run.
"""

import statistics
from collections.abc import Callable, Iterator

from frontier.case import shipped_names
from frontier.record import Record
from frontier.report.tables import Column, table, with_columns


def sections(records: list[Record]) -> Iterator[str]:
    """Markdown of what was graded on one machine; nothing where nothing was."""
    grades = [r for r in records if r.kind == "grade"]
    if grades:
        yield "### Graded by the benchmark script"
        yield with_columns(grades, _COLUMNS)
        yield from _series(grades)


def _series(grades: list[Record]) -> Iterator[str]:
    """Of each commit, where all in-core cases passed: medians of its runs, and the geometric mean of their speedups.

    Runs with options for the script, or of another file's class, are no part of it; nor do commits mix.
    """
    names = shipped_names()[:-1]
    for commit in dict.fromkeys(record.commit for record in grades):
        own = [r for r in grades if r.commit == commit and not (r.notes.get("options") or r.notes.get("drop_in"))]
        runs = {name: [r for r in own if r.case["name"] == name] for name in names}
        passed = {name: [r.notes for r in runs[name] if r.verdicts["script"]["verdict"] == "pass"] for name in names}
        if not all(passed.values()):
            continue
        where = f"`{(commit or 'unknown')[:12]}`"
        if max(map(len, passed.values())) > 1:
            yield f"Medians of the runs at {where}, with the least and the greatest:"
            yield table(
                ["case", "passed", "baseline ms", "ours ms", "speedup"],
                [
                    [
                        name,
                        f"{len(found)} of {len(runs[name])}",
                        _span([notes["baseline_ms"]["p50"] for notes in found], ".4g"),
                        _span([notes["optimized_ms"]["p50"] for notes in found], ".4g"),
                        _span([notes["speedup"] for notes in found], ".2f"),
                    ]
                    for name, found in passed.items()
                ],
            )
        medians = [statistics.median(notes["speedup"] for notes in found) for found in passed.values()]
        mean = statistics.geometric_mean(medians)
        yield f"Geometric mean of the speedups at {where}: **{mean:.2f} x**."


def _span(values: list[float], form: str) -> str:
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}{spread}"


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
    ("class of", lambda r: f"`{r.notes['drop_in']}`" if r.notes.get("drop_in") else "frontier"),
    ("options", lambda r: str(r.notes.get("options") or "")),
    ("reason", lambda r: str(r.notes.get("reason") or "")),
)
