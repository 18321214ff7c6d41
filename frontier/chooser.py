"""Picks the recipe for a case from evidence, and says why in one sentence.

Takes    a case, a machine, committed records.
Gives    a `Choice`; refusals of what was passed over.
Knows nothing of how records were made.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from frontier.case import Case
from frontier.errors import Unsupported
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Attention, Recipe, parse_recipe
from frontier.record import Record, read_records

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


def choose(
    case: Case,
    machine: Machine,
    wanted: str | None = None,
    records: Iterable[Record] | None = None,
    *,
    passes: int = 1,
    try_kernels: bool = True,
) -> Choice:
    """The recipe for a case: the one asked for, or the fastest that evidence admits and the canary passes.

    Fastest  counts a command's start (a kernel may be compiled then) and `passes` passes: FA4 gains 0.4 s a
             pass on case 14 and loses 13 s at its start.
    Order    passing records of this case on this card, fastest first; then of the nearest case on this card;
             then of this case on other cards; then their precision with a kernel of torch's own, which the
             canary checks at the case's length; then float32 with a fused kernel; then the reference.
    `try_kernels=False` believes each kernel's rule without running its canary: for overviews of many cases.

    Raises   Unsupported if the recipe asked for refuses: there is no silent fallback.
    """
    from frontier.layers.attention import ATTENTION
    from frontier.layers.canary import why_not

    def refusal(recipe: Recipe) -> str | None:
        return (why_not if try_kernels else ATTENTION[recipe.attention].refuses)(case, recipe, machine)

    known = list(read_records() if records is None else records)
    candidates = _candidates(case, machine, _admitted(known), passes)
    if wanted is not None:
        # Parts that were not named are those of the best candidate with which the named ones can serve.
        asked = list(dict.fromkeys(parse_recipe(wanted, base) for base, _ in [*candidates, (REFERENCE, "")]))
        reasons = {}
        for recipe in asked:
            reasons[recipe] = refusal(recipe)
            if reasons[recipe] is None:
                return Choice(recipe, "asked for")
        raise Unsupported(
            f"recipe {asked[0]} cannot serve case {case.name} on {machine.name}: {reasons[asked[0]]}",
            hint="`frontier machine` lists the kernels that can; leave out --recipe to let evidence choose",
        )
    passed_over: list[str] = []
    for recipe, why in candidates:
        reason = refusal(recipe)
        if reason is None:
            return Choice(recipe, why, tuple(passed_over))
        passed_over.append(f"{recipe}: {reason}")
    return Choice(REFERENCE, "nothing faster is admissible here", tuple(passed_over))


def _candidates(case: Case, machine: Machine, records: list[Record], passes: int) -> list[tuple[Recipe, str]]:
    """Recipes to try, best first, each once, with the reason for trying it."""
    here = [r for r in records if r.machine == machine.name]
    groups = (
        (
            _of_case(here, case),
            f"fastest passing record of this case on this card for {passes} pass{'es' * (passes > 1)}, start included",
        ),
        (_nearest(here, case), "no record of this case; the nearest on this card"),
        (_of_case(records, case) if machine.has_card else [], "no record of this card; passed elsewhere"),
    )
    found: dict[Recipe, str] = {}
    for group, why in groups:
        for record in sorted(group, key=lambda r: (_batch_distance(r, case), _cost_s(r, passes))):
            try:
                recipe = parse_recipe(record.recipe, REFERENCE)
            except Unsupported:  # a word of another version
                continue
            found.setdefault(
                recipe, f"{why}: case {record.case['name']}, {record.machine}, {record.median_s:.3g} s a pass"
            )
    for recipe in [r for r in found if machine.has_card and r.is_half]:
        for kernel in BUILT_IN_KERNELS:
            found.setdefault(replace(recipe, attention=kernel), f"{recipe} passed; this kernel by its canary alone")
    untried = parse_recipe(UNTRIED[machine.has_card], REFERENCE)
    found.setdefault(untried, "no record is near: float32 with a fused kernel")
    return list(found.items())


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


def _cost_s(record: Record, passes: int) -> float:
    return (record.startup_s or 0.0) + passes * (record.median_s or math.inf)
