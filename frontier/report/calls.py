"""The sections of RESULTS.md on calls of rows that already lie on the card: choices, ceilings, MFU, losers.

Takes    the records of one machine.
Gives    Markdown.
Knows nothing of how calls are timed or what the gate asks.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from frontier import tuned
from frontier.case import FLOAT32_BYTES, shipped_names
from frontier.record import Record
from frontier.report.tables import Column, gib, table, with_columns
from frontier.units import show_seconds

STREAMED = "14"  # the shipped case that no card holds: its time is a whole pass, host to host


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is known of one case: the record that stands for each recipe, and those that may serve, best first."""

    standing: list[Record]
    ranked: list[Record]
    first_s: dict[str, float]
    baseline: str = tuned.BASELINE
    yardstick: str = tuned.YARDSTICK

    @property
    def name(self) -> str:
        return str(self.standing[0].case["name"])

    @property
    def choice(self) -> Record | None:
        return self.ranked[0] if self.ranked else None

    def beside_choice_ms(self, name: str) -> float | None:
        """Another's time from the run in which the choice was timed."""
        times = self.choice.beside_ms.get(name) if self.choice else None
        return times["p50"] if times else None

    def first_result(self, record: Record) -> str:
        """Of its own run if that began without caches, else as `scripts/first_results.py` saw it."""
        seconds = record.first_result_s or self.first_s.get(record.recipe)
        return show_seconds(seconds) if seconds else "caches were warm"

    def speedup(self, recipe: str) -> float | None:
        other_ms = self.beside_choice_ms(recipe)
        return other_ms / tuned.call_ms(self.choice) if self.choice and other_ms else None


def sections(records: list[Record]) -> Iterator[str]:
    """Markdown of what was tuned and graded on one machine; a sentence where nothing was."""
    cases = _by_case([r for r in records if r.kind in ("tune", "first-result")])
    yield "### Calls on rows that lie on the card"
    if not cases:
        yield "No recipe of the in-core cases is recorded as tuned here yet: `frontier tune` does it."
    else:
        yield _explained(cases)
        yield with_columns(cases, _CHOICE_COLUMNS)
        yield _means(cases)
        yield _utilisation(cases, records)
        yield "### Tuned and not chosen"
        yield table(_LOSER_HEAD, [row for case in cases for row in _losers(case)])


def _by_case(records: list[Record]) -> list[Tuned]:
    """Tuned records of each problem, shipped cases first, by number."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    firsts: dict[str, dict[str, float]] = {}
    for record in records:
        if record.kind == "first-result":
            if record.first_result_s:
                firsts.setdefault(record.case["name"], {})[record.recipe] = record.first_result_s
            continue
        problem = tuple(value for key, value in record.case.items() if key not in ("name", "seed", "input_scale"))
        groups.setdefault(problem, []).append(record)
    known = [
        Tuned(tuned.standing(group), tuned.ranking(group), firsts.get(str(group[0].case["name"]), {}))
        for group in groups.values()
    ]
    return sorted(known, key=lambda case: (not case.name.isdigit(), len(case.name), case.name))


def _explained(cases: list[Tuned]) -> str:
    yard = (
        " *yardstick* is plain fp16 SDPA layers (float32 residual and norms, packed q, k, v) under "
        '`torch.compile(mode="max-autotune")`, all rows in one call.'
    )
    return (
        "Made by `frontier tune --case N --recipes R`. Times are medians of single calls with the 20th and 80th "
        "percentile, between two events each, inputs and outputs on the card; a row's baseline, yardstick and choice "
        "were taken in turn in one run. "
        "*baseline* is the dense layer as the benchmark script has it: eager, TF32 on a card, an all-true mask."
        f"{yard if any(case.beside_choice_ms(case.yardstick) for case in cases) else ''} "
        "*compute floor*: FLOP of the case at the card's measured half-precision matmul rate; *bytes floor*: float32 "
        "input and output once at its measured copy rate. *error budget*: the largest fraction that any element of any "
        "trial at scale 1 spent, against float32 without TF32 and, behind the stroke, against what the benchmark "
        "script computes; below 1 passes. With inputs scaled to 0.01 and below, TF32 itself spends more than the "
        "budget against exact float32 on most cases: there exact float32 alone is the judge, of which 0.8 may be "
        "spent, and no more trials may fail the script's reference than exact float32 fails. *first result*: from "
        "weights on the host, with no compile cache, 13 processes side by side."
    )


def _choice(show: Callable[[Record], str]) -> Callable[[Tuned], str]:
    return lambda case: show(case.choice) if case.choice else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _times(record: Record) -> str:
    times = record.call_ms
    spread = f" ({_ms(times['p20'])} to {_ms(times['p80'])})" if "p20" in times else ""
    return f"{_ms(times['p50'])}{spread}"


def _runner_up(case: Tuned) -> str:
    second = case.ranked[1] if len(case.ranked) > 1 else None
    return f"`{second.recipe}` {_ms(tuned.call_ms(second))}" if second else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def floors_ms(record: Record) -> dict[str, float]:
    """The two ceilings of a call, by name; without those whose rate was not measured."""
    gemm_tflops, copy_gbps = record.notes.get("gemm_tflops"), record.notes.get("copy_gbps")
    case = record.case
    both_ways_bytes = 2 * case["batch_size"] * case["seq_len"] * case["d_model"] * FLOAT32_BYTES
    floors = {"compute": record.flops / gemm_tflops / 1e9 if gemm_tflops else None}
    floors["bytes"] = both_ways_bytes / copy_gbps / 1e6 if copy_gbps else None
    return {name: floor for name, floor in floors.items() if floor is not None}


def _binds(record: Record) -> str:
    floors = floors_ms(record)
    if not floors:
        return ""
    name = max(floors, key=lambda name: floors[name])
    return f"{name}, {floors[name] / tuned.call_ms(record):.1%} of it reached"


def _budget(record: Record) -> str:
    exact = tuned.budget_of(record)
    groups = record.verdicts["gate"].get("groups", [])
    usual = [g for g in groups if g.get("scale") == 1 and not g.get("stress")]
    if groups and not usual:  # a failure before scale 1 ended the program
        return ""
    script = max((max(map(float, g["script"]["budgets"])) for g in usual if g.get("script")), default=None)
    return " / ".join(f"{value:.3f}" for value in (exact, script) if value is not None)


_CHOICE_COLUMNS: tuple[Column[Tuned], ...] = (
    ("case", lambda case: case.name),
    ("baseline ms", lambda case: _ms(case.beside_choice_ms(case.baseline))),
    ("yardstick ms", lambda case: _ms(case.beside_choice_ms(case.yardstick))),
    ("choice", lambda case: f"`{case.choice.recipe}`" if case.choice else "none passed the whole stress program"),
    ("ms", _choice(_times)),
    ("x baseline", lambda case: _ratio(case.speedup(case.baseline))),
    ("x yardstick", lambda case: _ratio(case.speedup(case.yardstick))),
    ("runner-up, ms", _runner_up),
    ("compute floor ms", _choice(lambda r: _ms(floors_ms(r).get("compute")))),
    ("bytes floor ms", _choice(lambda r: _ms(floors_ms(r).get("bytes")))),
    ("higher floor", _choice(_binds)),
    ("error budget", _choice(_budget)),
    ("trials", _choice(lambda r: str(r.notes["trials"]))),
    ("peak GiB", _choice(lambda r: gib(r.device_peak_bytes))),
    ("first result", lambda case: case.first_result(case.choice) if case.choice else ""),
)


def _means(cases: list[Tuned]) -> str:
    """Geometric means of both ratios, over the shipped cases that have them."""
    told = []
    for name in ("baseline", "yardstick"):
        ratios = {
            c.name: ratio for c in cases if c.name.isdigit() and (ratio := c.speedup(getattr(c, name))) is not None
        }
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            told.append(f"**{mean:.2f} x the {name}** over {_listed(list(ratios))}")
    return f"Geometric means: {'; '.join(told)}." if told else "No shipped case has a choice yet."


def _listed(names: list[str]) -> str:
    """Case numbers with runs drawn together: cases 1-9 and 12."""
    runs: list[list[int]] = []
    for number in sorted(map(int, names)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"case{'s' * (len(names) > 1)} {' and '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))}"


def _utilisation(cases: list[Tuned], records: list[Record]) -> str:
    """FLOP-weighted MFU, in-core cases alone and with the streamed one, by both denominators."""
    spent = {c.name: (c.choice.flops, tuned.call_ms(c.choice) / 1e3) for c in cases if c.choice and c.name.isdigit()}
    runs = [r for r in records if r.kind == "run" and r.case["name"] == STREAMED and r.median_s and not r.refused]
    whole = dict(spent)
    if runs:
        fastest = min(runs, key=lambda r: r.median_s or math.inf)
        whole[STREAMED] = (fastest.flops, fastest.median_s or math.inf)
    rates = _denominators([r for c in cases for r in c.standing])
    if not rates or not spent:
        return "MFU: the card's rates were not measured here."
    lines = [
        "FLOP-weighted MFU = sum of FLOP / (rate x sum of seconds), over one call of each case (for case 14 one pass, "
        "host to host): the mean of the cases' rates in which each weighs as its FLOP do. A multiply and an add are "
        "two, causal attention counts what is visible."
    ]
    for chosen in (spent, whole) if len(whole) > len(spent) else (spent,):
        flops, seconds = (sum(part) for part in zip(*chosen.values(), strict=True))
        shares = ", ".join(
            f"{flops / seconds / 1e12 / rate:.1%} of {rate:,.0f} TFLOP/s ({name})" for name, rate in rates.items()
        )
        missing = [name for name in shipped_names() if name not in chosen]
        gap = f"; without {_listed(missing)}" if chosen is whole and missing else ""
        lines.append(f"- {_listed(list(chosen))}: {flops / seconds / 1e12:,.1f} TFLOP/s = {shares}{gap}")
    return "\n".join(lines)


def _denominators(records: list[Record]) -> dict[str, float]:
    """The card's own rates, medians over runs."""
    names = {"float32_peak_tflops": "the card's float32 peak", "gemm_tflops": "its measured half-precision matmul"}
    found = {told: [r.notes[key] for r in records if r.notes.get(key)] for key, told in names.items()}
    return {told: statistics.median(values) for told, values in found.items() if values}


_LOSER_HEAD = ("case", "recipe", "ms", "x choice", "error budget", "first result", "peak GiB", "source", "why not")


def _losers(case: Tuned) -> Iterator[tuple[str, ...]]:
    """All but the choice, fastest first, those without times last."""
    others = [r for r in case.standing if r is not case.choice]
    for record in sorted(others, key=lambda r: tuned.call_ms(r) if r.call_ms else math.inf):
        times = record.call_ms
        against = f"{1 - tuned.lead(record, case.choice):.2f}" if times and case.choice else ""
        first = show_seconds(record.first_result_s) if record.first_result_s else ""
        judged = _budget(record) if record.verdicts else ""
        yield (
            case.name,
            f"`{record.recipe}`",
            _ms(times.get("p50")),
            against,
            judged,
            first,
            gib(record.device_peak_bytes),
            record.source_sha256[:6],
            why_not(record, case),
        )


def why_not(record: Record, case: Tuned) -> str:
    """One line on why a recipe was not chosen."""
    if record.refused:
        return record.refused
    gate = record.verdicts["gate"]
    if record.notes["outcome"] == "fail":
        return f"fails the gate: {_worst(gate)}"
    if case.choice is not None and tuned.why_denied(record) is None:
        slower = -tuned.lead(record, case.choice)
        noise = tuned.band(record, case.choice)
        if abs(slower) <= noise:
            return f"within the noise of the choice ({slower:+.1%}, noise {noise:.1%})"
        if slower > 0:
            return f"slower by {slower:.0%}"
    reasons = gate.get("reasons") or ["not through the whole stress program"]
    return f"passes its trials, not promoted: {reasons[0]}"


def _worst(gate: dict[str, Any]) -> str:
    worst = gate.get("worst") or {}
    if worst.get("faults"):
        return ", ".join(worst["faults"])
    if worst.get("verdict") == "pass" or "row" not in worst:
        return str((gate.get("reasons") or ["see its record"])[0])
    place = f"row {worst['row']}, position {worst['position']}, channel {worst['channel']}"
    values = f"{float(worst['got']):.6g} for {float(worst['wanted']):.6g}"
    return f"{float(worst['budget']):.3g} of the budget at {place} ({values}), {worst.get('trial', 'one trial')}"
