"""The sections of RESULTS.md on rows cut into chunks, and on what was measured beside runs.

Takes    the records of one machine.
Gives    Markdown.
Knows nothing of how they were made.
"""

import json
from collections.abc import Iterator

from frontier.case import Case
from frontier.record import Record
from frontier.report.tables import gib, name_of, share, table

_ELSEWHERE = ("run", "resumed", "proxy", "tune", "grade")  # kinds that have tables of their own
_UNLESS_REFUSED = ("chunk-error", "first-result")
_CHUNKS = ("1", "2", "8", "64")
_HEAD = (
    "run", "attention", "device budget", "chunk", "keys wait", "from, to", "pass s", "attention TFLOP/s",
    "of the kernel alone", "all TFLOP/s", "x no budget", "card busy", "device GiB, of plan", "host GiB, of plan",
)  # fmt: skip
_SAYS = (
    "*attention TFLOP/s* is the FLOP of attention alone by the seconds of the whole pass, *of the kernel alone* its "
    "share of the fastest plain call of the same kernel on one row that lies on the card, of the length in brackets: "
    "above 100% where the kernel is faster at a chunk's size (*chunk_tflops* of its record below) than at that length; "
    "*all TFLOP/s* counts projections and feed-forward too, with its share. *x no budget*: beside the same run without "
    "a device budget. *card busy*: the union of compute events by the pass."
)
_CHUNKS_SAY = (
    "One row cut into so many chunks, whose attention is merged by log-sum-exp in float32, against the referee's "
    "float64: the error's norm over the row's, and the largest budget fraction in brackets."
)


def sections(records: list[Record]) -> Iterator[str]:
    """Markdown of what there is; nothing where there is nothing."""
    done = [r for r in records if r.kind == "run" and r.median_s and not r.refused and "superseded" not in r.notes]
    if cut := [r for r in done if r.plan.get("flow") == "chunked"]:
        yield f"### Rows in chunks\n\n{_SAYS}"
        yield table(_HEAD, [_row(record, done, records) for record in cut])
    if errors := [r for r in records if r.kind == "chunk-error" and not r.refused]:
        yield f"### Error against the number of chunks\n\n{_CHUNKS_SAY}"
        head = [f"{count} chunk{'s' * (count != '1')}" for count in _CHUNKS]
        yield table(["case", "recipe", *head, "command"], map(_curve, errors))
    others = [r for r in records if r.kind not in _ELSEWHERE]
    if beside := [r for r in others if r.refused or r.kind not in _UNLESS_REFUSED]:
        yield "### Measured beside the runs"
        rows = [(name_of(r), r.kind, r.recipe, _found(r), f"`{r.command}`") for r in beside]
        yield table(["what", "kind", "recipe", "found", "command"], rows)


def _row(record: Record, done: list[Record], records: list[Record]) -> tuple[str, ...]:
    case, seconds, plan = Case(**record.case), record.median_s or 0.0, record.plan
    rate = case.batch_size * case.layers * case.attention_flops_per_row / seconds / 1e12
    alone = [r for r in records if r.kind == "kernel" and r.recipe == record.recipe and not r.refused]
    alone = [r for r in alone if all(r.case[key] == record.case[key] for key in ("d_model", "heads", "causal"))]
    nearest = min(alone, key=lambda r: abs(r.case["seq_len"] - case.seq_len), default=None)
    own = nearest.notes["attention_tflops"] if nearest else 0.0
    same = [r for r in done if (r.case, r.recipe, r.input) == (record.case, record.recipe, record.input)]
    free_s = min((r.median_s or 0.0 for r in same if "device_budget" not in r.notes), default=0.0)
    place, budget = record.notes.get("place"), record.notes.get("device_budget")
    spread = f" ({min(record.pass_s):.3f} to {max(record.pass_s):.3f})" if len(record.pass_s) > 1 else ""
    return (
        name_of(record),
        record.recipe.split("/")[-1],
        str(budget or "none"),
        f"{plan['chunk']:,}",
        str(plan["spool"]),
        f"{record.input}, {record.output}" + f" ({place})" * bool(place),
        f"{seconds:.3f}{spread}",
        f"{rate:.4g}",
        f"{rate / own:.1%} of {own:.4g} ({nearest.case['seq_len']:,})" if nearest else "",
        f"{record.tflops:.4g}" + (f", {(record.tflops or 0.0) / own:.1%}" if own else ""),
        f"{seconds / free_s:.3f}" if free_s and budget else "",
        f"{record.busy_s.get('compute', 0.0) / seconds:.1%}",
        f"{gib(record.device_peak_bytes)}, {share(record.device_peak_bytes, record.device_planned_bytes)}",
        f"{gib(record.host_peak_bytes)}, {share(record.host_peak_bytes, record.host_planned_bytes)}",
    )


def _curve(record: Record) -> list[str]:
    found = (record.notes["errors"][count] for count in _CHUNKS)
    errors = (f"{error['rms']:.3g} ({error['budget']:.3f})" for error in found)
    return [name_of(record), record.recipe, *errors, f"`{record.command}`"]


def _found(record: Record) -> str:
    notes = {key: value for key, value in record.notes.items() if key not in ("name", "series", "command_s")}
    times = f"{record.call_ms['p50']:.4g} ms; " if record.call_ms else ""
    return record.refused or times + json.dumps(notes)[1:-1].replace('"', "")
