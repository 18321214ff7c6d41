"""Picks the recipe for a case from evidence, and says why in one sentence.

Takes    a case, a machine, committed records.
Gives    a `Choice`; refusals of what was passed over.
Knows nothing of how records were made.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from frontier import tuned
from frontier.case import Case
from frontier.errors import CaseError, Unsupported
from frontier.layers.costs import chunk_refusal
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Attention, Recipe, parse_recipe
from frontier.record import Record, read_records
from frontier.units import show_bytes

# What to try where no record speaks, with a card and without: float32 arithmetic with a fused kernel.
UNTRIED = {True: "fp32/packed/efficient", False: "fp32/packed/flash"}

# Kernels that every CUDA build of torch brings, fastest first on an H200; the last serves cards back to a T4.
BUILT_IN_KERNELS: tuple[Attention, ...] = ("cudnn", "flash", "efficient")


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe and the sentence that justifies it; `passed_over` has the reason for each better one refused."""

    recipe: Recipe
    why: str
    passed_over: tuple[str, ...] = ()


class Candidate(NamedTuple):
    """A recipe that evidence names, why it is tried, and what evidence itself holds against it."""

    recipe: Recipe
    why: str
    against: str | None = None
    peak_bytes: int | None = None
    is_foreign: bool = False  # its evidence is of another card


def choose(
    case: Case,
    machine: Machine,
    wanted: str | None = None,
    records: Iterable[Record] | None = None,
    *,
    passes: float = 1,
    try_kernels: bool = True,
    out_of_memory: Collection[Recipe] = (),
    chunk: int | None = None,
) -> Choice:
    """The recipe for a case: the one asked for, or the fastest that evidence admits and the canary passes.

    Fastest  counts a command's start (a kernel may be compiled then) and `passes` passes of a stream: FA4 gains
             0.4 s a pass on case 14 and loses 13 s at its start. With `passes=math.inf` it is for calls on rows
             that lie on the device, again and again: starts do not count, and tuned records speak first.
    Order    passing records of this case on this card, fastest first; then of the nearest case on this card;
             then of this case on other cards, where a fused stack meets a canary of its own; then their precision
             with a kernel of torch's own, which the canary checks at the case's length; then float32 with a fused
             kernel; then the reference.
    `chunk` is the length at which rows are cut, if they are: then a recipe must be able to, and the canary runs so.
    `try_kernels=False` believes each kernel's rule without running its canary: for overviews of many cases.
    `out_of_memory` names recipes that ran out of it here: they and all that are known to hold as much are passed
    over.

    Raises   Unsupported if the recipe asked for refuses: there is no silent fallback.
    """
    from frontier.fused_canary import fused_canary
    from frontier.layers.canary import why_not
    from frontier.layers.program import refusal as rule

    known = list(read_records() if records is None else records)
    found = candidates(case, machine.name, machine.has_card, known, passes)
    tried_here = {candidate.recipe for candidate in found if not candidate.is_foreign}

    def refusal(recipe: Recipe) -> str | None:
        if not try_kernels:
            return (chunk and chunk_refusal(recipe)) or rule(case, recipe, machine)
        reason = why_not(case, recipe, machine, chunk)
        if reason is None and machine.has_card and recipe not in tried_here:
            reason = fused_canary(case, recipe, machine)
        return reason

    if wanted is not None:
        # Parts that were not named are those of the best candidate with which the named ones can serve.
        asked = list(dict.fromkeys(parse_recipe(wanted, base) for base in [*(c.recipe for c in found), REFERENCE]))
        reasons = {}
        for recipe in asked:
            reasons[recipe] = refusal(recipe)
            if reasons[recipe] is None:
                return Choice(recipe, "asked for")
        raise Unsupported(
            f"recipe {asked[0]} cannot serve case {case.name} on {machine.name}: {reasons[asked[0]]}",
            hint="`frontier machine` lists the kernels that can; leave out --recipe to let evidence choose",
        )
    peaks = [c.peak_bytes for c in found if c.recipe in out_of_memory and c.peak_bytes]
    passed_over: list[str] = []
    for candidate in found:
        reason = candidate.against
        if candidate.recipe in out_of_memory:
            reason = "out of memory"
        elif peaks and (candidate.peak_bytes or 0) >= min(peaks):
            reason = f"it holds {show_bytes(candidate.peak_bytes or 0)}, and {show_bytes(min(peaks))} were too much"
        reason = reason or refusal(candidate.recipe)
        if reason is None:
            return Choice(candidate.recipe, candidate.why, tuple(passed_over))
        passed_over.append(f"{candidate.recipe}: {reason}")
    return Choice(REFERENCE, "nothing faster is admissible here", tuple(passed_over))


def choose_on_paper(case: Case, machine_name: str, records: Iterable[Record], passes: float = math.inf) -> Choice:
    """What `choose` would say on a card of that name, from records alone: no kernel is asked whether it refuses.

    Raises   Unsupported if no record is of that card.
    """
    known = list(records)
    names = dict.fromkeys(record.machine for record in known)
    if machine_name not in names:
        raise Unsupported(f"no record of `{machine_name}`", hint=f"there are records of {', '.join(names) or 'none'}")
    has_card = any("driver" in record.versions for record in known if record.machine == machine_name)
    found = candidates(case, machine_name, has_card, known, passes)
    passed_over = tuple(f"{c.recipe}: {c.against}" for c in found if c.against)
    best = next(c for c in found if not c.against)
    return Choice(best.recipe, best.why, passed_over)


def candidates(case: Case, name: str, has_card: bool, records: list[Record], passes: float) -> list[Candidate]:
    """Recipes to try on a machine of that name, best first, each once, with the reason for trying it."""
    streams = list(_streamed(case, name, has_card, records, passes))
    calls = list(_called(case, name, has_card, records, passes))
    # Tuned records time calls, others whole passes with their transfers: each knows its own purpose best.
    ordered = [*calls, *streams] if math.isinf(passes) else [*streams, *calls]
    ordered.sort(key=lambda candidate: candidate[0])
    found: dict[Recipe, Candidate] = {}
    for _, candidate in ordered:
        if found.setdefault(candidate.recipe, candidate).against and not candidate.against:
            found[candidate.recipe] = candidate
    passed = [c.recipe for c in found.values() if not c.against and c.recipe.fusion == "by-part"]
    for recipe in [r for r in passed if has_card and r.is_half]:
        for kernel in BUILT_IN_KERNELS:
            other = replace(recipe, attention=kernel)
            found.setdefault(other, Candidate(other, f"{recipe} passed; this kernel by its canary alone"))
    untried = parse_recipe(UNTRIED[has_card], REFERENCE)
    found.setdefault(untried, Candidate(untried, "no record is near: float32 with a fused kernel"))
    return list(found.values())


# Of candidates: how near their evidence is.
_THIS_CASE, _NEAREST, _ELSEWHERE = range(3)


def _streamed(
    case: Case, name: str, has_card: bool, records: list[Record], passes: float
) -> Iterator[tuple[int, Candidate]]:
    """What runs and proxies say."""
    admitted = _admitted([r for r in records if r.kind in ("run", "proxy")])
    here = [r for r in admitted if r.machine == name]
    much = "" if math.isinf(passes) else f" for {passes} pass{'es' * (passes > 1)}, start included"
    groups = (
        (_of_case(here, case), f"fastest passing record of this case on this card{much}"),
        (_nearest(here, case), "no record of this case; the nearest on this card"),
        (_of_case(admitted, case) if has_card else [], "no record of this card; passed elsewhere"),
    )
    for near, (group, why) in enumerate(groups):
        for record in sorted(group, key=lambda r: (_batch_distance(r, case), _cost_s(r, passes))):
            recipe = _readable(record.recipe)
            if recipe is not None:
                told = f"{why}: case {record.case['name']}, {record.machine}, {record.median_s:.3g} s a pass"
                yield near, Candidate(recipe, told, is_foreign=near == _ELSEWHERE)


def _called(
    case: Case, name: str, has_card: bool, records: list[Record], passes: float
) -> Iterator[tuple[int, Candidate]]:
    """What tuned records say: of this shape, of the nearest shapes of this width and depth, of other cards."""
    here = tuned.tuned(records, name)
    others = dict.fromkeys(r.machine for r in records if r.kind == "tune" and r.machine != name) if has_card else {}
    own = tuned.of_call(here, case)
    denied = {r.recipe: why for r in tuned.standing(own) if (why := tuned.why_denied(r))}
    groups = [(_THIS_CASE, own, "fastest tuned on this card for this shape")]
    shapes = sorted({tuned.shape_of(r) for r in tuned.of_kin(here, case)}, key=lambda s: tuned.distance(s, case))
    for shape in shapes:
        alike = [r for r in tuned.of_kin(here, case) if tuned.shape_of(r) == shape]
        if shape != (case.batch_size, case.seq_len):
            groups.append((_NEAREST, alike, "this shape was not tuned; the nearest on this card"))
    groups += [
        (_ELSEWHERE, tuned.of_call(tuned.tuned(records, other), case), "not tuned on this card; passed elsewhere")
        for other in others
    ]
    for near, group, why in groups:
        ranked = tuned.ranking(group)
        if not math.isinf(passes):
            ranked.sort(key=lambda r: (r.first_result_s or 0.0) + passes * tuned.call_ms(r) / 1e3)
        for record in ranked:
            recipe = _readable(record.recipe)
            # A stream's slices come in two lengths, the last one's too: what is compiled for each costs minutes.
            if recipe is None or (not math.isinf(passes) and recipe.launch.startswith("compile")):
                continue
            budget = tuned.expected_budget(record, case)
            against = None if near == _THIS_CASE else denied.get(record.recipe)
            if near == _NEAREST and budget > 1 - tuned.HEADROOM:
                against = f"passed case {record.case['name']}; here its error would take {budget:.2f} of the budget"
            told = f"{why}: {tuned.told(record)}"
            yield near, Candidate(recipe, told, against, record.device_peak_bytes, near == _ELSEWHERE)


def _readable(text: str) -> Recipe | None:
    try:
        return parse_recipe(text, REFERENCE)
    except CaseError:  # a word of another version
        return None


def _admitted(records: list[Record]) -> list[Record]:
    """Timed records of recipes that some judge passed and none failed, on that card at that width and depth.

    A recipe is judged where judging is cheap (a proxy length, two watched rows) and timed in other runs.
    """
    keys = ("d_model", "heads", "ffn_dim", "layers", "causal")

    def kin(record: Record) -> tuple[Any, ...]:
        return record.machine, record.recipe, *(record.case[key] for key in keys)

    passed = {kin(r) for r in records if "pass" in r.given_verdicts}
    failed = {kin(r) for r in records if any(verdict != "pass" for verdict in r.given_verdicts)}
    return [r for r in records if r.median_s and not r.refused and kin(r) in passed - failed]


def _of_case(records: list[Record], case: Case) -> list[Record]:
    """Records of the same problem: everything but seeds, batch size and name is equal."""
    keys = ("seq_len", "d_model", "heads", "ffn_dim", "layers", "causal")
    return [r for r in records if all(r.case[key] == getattr(case, key) for key in keys)]


def _nearest(records: list[Record], case: Case) -> list[Record]:
    """Records of the nearest length among those whose width and heads, which decide the error, are equal."""
    same = [r for r in records if (r.case["d_model"], r.case["heads"]) == (case.d_model, case.heads)]
    if not same:
        return []
    distance = min(_length_distance(r, case) for r in same)
    return [r for r in same if _length_distance(r, case) == distance]


def _length_distance(record: Record, case: Case) -> float:
    return abs(math.log(record.case["seq_len"] / case.seq_len))


def _batch_distance(record: Record, case: Case) -> float:
    return abs(math.log(record.case["batch_size"] / case.batch_size))


def _cost_s(record: Record, passes: float) -> float:
    start_s, pass_s = record.startup_s or 0.0, record.median_s or math.inf
    return pass_s if math.isinf(passes) else start_s + passes * pass_s
