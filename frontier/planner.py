"""Turns case, machine and recipe into a cut, a depth and a ledger, or refuses with the sum. Pure; no torch.

Takes    what, where and how.
Gives    a `Plan`: how much at a time, and every byte it will hold, by name and place.
Knows nothing of files' contents, streams or kernels.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from frontier import ledger, spans
from frontier.case import Case
from frontier.errors import DoesNotFit, FrontierError, Unsupported
from frontier.layers.costs import (
    MOST_ELEMENTS,
    MOST_POSITIONS,
    chunk_refusal,
    most_positions_per_call,
    most_rows_per_call,
)
from frontier.ledger import NOTHING_KEPT, PLACES, Entry, Keeping, Place, Spool
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.recipe import Recipe
from frontier.units import show_bytes

__all__ = ["PLACES", "Entry", "Flow", "Keeping", "Place", "Plan", "Spool", "budgets", "host_total_bytes", "plan"]

Flow = Literal["whole", "chunked"]

# Three slots: one being read or written, one on its way over the link, one at work. Two lose the overlap of
# reading with writing; more than three hold memory for nothing while reads keep up.
USUAL_DEPTH = 3

# Tokens of a slice, with a card and without: long enough that launches and calls cost nothing beside the work;
# more rows would only hold more memory and leave fewer slices to overlap.
USUAL_SLICE_TOKENS = {True: 131_072, False: 4_096}

# Positions of a chunk, with a card and without: more leave fewer to overlap; half the least, and keys take longer to
# arrive than to be met: 8,192 of case 14 in fp16 0.61 ms at 55 GB/s, 0.55 ms at 500 TFLOP/s.
USUAL_CHUNK, LEAST_CHUNK = {True: 65_536, False: 4_096}, {True: 16_384, False: 512}
# Keys on the card need not arrive: in chunks of 4,096 case 14 kept an H200 busy for 5.4 s a pass, of 16,384 for 3.75 s.
# From the second length on a copy within the host hides too: a million positions took 11.4 s so, 12.0 s by short ones.
LEAST_BESIDE_KEYS, COPY_HIDES_FROM, WHERE_IT_HIDES = 8_192, 32_768, {"pinned": 1.5, "host": -1.5}
SHORTEST_CHUNK = 128  # of a plan's own: shorter ones spend all their time on launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a case will be carried out on a machine, and the bytes it will hold.

    chunk    positions of a chunk where rows are cut (flow `chunked`; then a slice is a row), None: whole rows
    spool    where keys and values of a row wait that is cut
    why      one sentence for the flow
    """

    case: Case
    machine: Machine
    recipe: Recipe
    slice_rows: int
    ring_depth: int
    ledger: tuple[Entry, ...]
    chunk: int | None = None
    spool: Spool | None = None
    why: str = "whole rows fit"

    @property
    def flow(self) -> Flow:
        return "whole" if self.chunk is None else "chunked"

    @property
    def num_chunks(self) -> int:
        """Of one row."""
        return -(-self.case.seq_len // (self.chunk or self.case.seq_len))

    @property
    def num_slices(self) -> int:
        return -(-self.case.batch_size // self.slice_rows)

    @property
    def cut(self) -> str:
        """How the batch is cut, for people and for a resume to compare."""
        if self.chunk is None:
            return f"{_counted(self.num_slices, 'slice')} of {_counted(self.slice_rows, 'row')}"
        return f"each row in {_counted(self.num_chunks, 'chunk')} of {_counted(self.chunk, 'position')}"

    def held_bytes(self, place: Place) -> int:
        return sum(entry.num_bytes for entry in self.ledger if entry.place == place)

    @property
    def allocator_bytes(self) -> int:
        """What PyTorch's allocator may hold on the card: the card's entries without the CUDA context."""
        return self.held_bytes("card") - (CONTEXT_BYTES if self.machine.has_card else 0)

    def as_dict(self) -> dict[str, Any]:
        """The plain values, for manifests and records."""
        return {
            "recipe": str(self.recipe),
            "flow": self.flow,
            "chunk": self.chunk,
            "spool": self.spool,
            "why": self.why,
            "slice_rows": self.slice_rows,
            "num_slices": self.num_slices,
            "ring_depth": self.ring_depth,
            "planned_bytes": {place: self.held_bytes(place) for place in PLACES},
            "ledger": [entry._asdict() for entry in self.ledger],
        }


def plan(
    case: Case,
    machine: Machine,
    recipe: Recipe,
    keeping: Keeping = NOTHING_KEPT,
    *,
    ring_depth: int | None = None,
    slice_rows: int | None = None,
    free_disk_bytes: int | None = None,
    flow: Flow | None = None,
    chunk: int | None = None,
    spool: Spool | None = None,
    spool_disk_bytes: int | None = None,
) -> Plan:
    """Whole rows if one fits every budget, else rows cut into chunks; `flow`, `chunk` and `spool` ask for one of them.

    `spool_disk_bytes`   free for keys and values in a file; None if there is no place for one.

    Raises   CaseError if a watched row is none of the case's; DoesNotFit with the sum of the smallest plan
             tried; Unsupported if a call would be too long for the kernels, or the recipe cannot cut rows.
    """
    case.check_watched(keeping.watch)
    if flow == "whole" and (chunk or spool):
        what = "spool" if chunk is None else f"chunk of {chunk}"
        raise Unsupported(f"whole rows have no {what}", hint="leave out --chunk and --spool, or --flow whole")
    refused: FrontierError | None = None
    if flow != "chunked" and chunk is None and spool is None:
        try:
            whole = _whole(case, machine, recipe, keeping, ring_depth, slice_rows)
            return _first_that_fits(whole, free_disk_bytes)
        except (DoesNotFit, Unsupported) as reason:
            refused = reason
            if flow == "whole" or (slice_rows or 1) > 1:
                raise
    if (against := chunk_refusal(recipe)) is not None:
        if refused is not None:
            refused.hint = f"{refused.hint}; rows cannot be cut into chunks: {against}"
            raise refused
        raise Unsupported(f"recipe {recipe} cannot cut rows into chunks: {against}", hint="name another --recipe")
    has_room = spool_disk_bytes is not None and ledger.spool_size(case, recipe, "disk") <= spool_disk_bytes
    if spool == "pinned" and not machine.has_card:
        raise Unsupported("pinned memory is for copies to a card, and there is none", hint="take --spool host")
    usable: dict[Spool, bool] = {"card": True, "pinned": machine.has_card, "host": True, "disk": has_room}
    spools = (spool,) if spool else tuple(place for place in usable if usable[place])
    why = "asked for" if refused is None else str(refused).partition(" (")[0]
    chunked = _chunked(case, machine, recipe, keeping, ring_depth, chunk, spools)
    return replace(_first_that_fits(chunked, free_disk_bytes), why=why)


def _first_that_fits(candidates: Iterable[Plan], free_disk_bytes: int | None) -> Plan:
    """Raises DoesNotFit with the sum of the last one tried."""
    tried: Plan | None = None
    for tried in candidates:
        if not _overruns(tried, free_disk_bytes):
            return tried
    assert tried is not None
    raise _refusal(tried, free_disk_bytes)


def _whole(
    case: Case, machine: Machine, recipe: Recipe, keeping: Keeping, ring_depth: int | None, slice_rows: int | None
) -> Iterator[Plan]:
    """The deepest usual ring first, then the longest usual slices."""
    most_rows = min(most_rows_per_call(case), case.batch_size)
    if most_rows < 1:
        raise Unsupported(
            f"one row of case {case.name} has {3 * case.seq_len * case.d_model:,} elements of q, k and v in "
            f"{case.seq_len:,} positions; kernels address {MOST_ELEMENTS:,} and take {MOST_POSITIONS:,}",
            hint="leave out --flow whole, so that rows are cut into chunks; or shorten --seq-len",
        )
    usual_rows = min(most_rows, max(1, USUAL_SLICE_TOKENS[machine.has_card] // case.seq_len))
    if slice_rows and min(slice_rows, case.batch_size) > most_rows:
        raise Unsupported(
            f"a slice of {slice_rows} rows of case {case.name} has "
            f"{3 * slice_rows * case.seq_len * case.d_model:,} elements "
            f"of q, k and v; kernels address {MOST_ELEMENTS:,}",
            hint=f"take {most_rows} rows a slice at most",
        )
    sizes = [min(slice_rows, most_rows)] if slice_rows else _halvings(usual_rows)
    for depth, rows in ((depth, rows) for depth in _depths(ring_depth) for rows in sizes):
        lent = depth if ring_depth else min(depth, -(-case.batch_size // rows))
        held = ledger.whole_rows(case, machine, recipe, keeping, lent, rows)
        yield Plan(case=case, machine=machine, recipe=recipe, slice_rows=rows, ring_depth=lent, ledger=held)


def _chunked(
    case: Case,
    machine: Machine,
    recipe: Recipe,
    keeping: Keeping,
    ring_depth: int | None,
    chunk: int | None,
    spools: tuple[Spool, ...],
) -> Iterator[Plan]:
    """Best first: chunks long enough, slots to overlap, the nearest spool, the deepest ring, the longest chunk."""
    most, least = most_positions_per_call(case), LEAST_CHUNK[machine.has_card]
    if chunk is not None and min(chunk, case.seq_len) > most:
        what = f"a chunk of {chunk:,} positions of case {case.name}: kernels take {most:,} at most"
        raise Unsupported(what, hint=f"take --chunk {most} or less")
    usual, beside_keys = min(USUAL_CHUNK[machine.has_card], most), min(least, LEAST_BESIDE_KEYS)
    sizes = [chunk] if chunk else spans.even_lengths(case.seq_len, min(usual, case.seq_len), SHORTEST_CHUNK)
    ways = [(s, spool, depth) for s in sizes for spool in spools for depth in _depths(ring_depth)]
    short = {way: way[0] < (beside_keys if way[1] == "card" else least) for way in ways}
    far = {w: spools.index(w[1]) + (w[0] >= COPY_HIDES_FROM) * WHERE_IT_HIDES.get(w[1], 0) for w in ways}
    ways.sort(key=lambda way: (short[way], way[2] < 2, far[way], -way[2], -way[0]))
    for size, spool, depth in ways:
        yield Plan(
            case=case,
            machine=machine,
            recipe=recipe,
            slice_rows=1,
            ring_depth=depth,
            ledger=ledger.chunked_rows(case, machine, recipe, keeping, depth, size, spool),
            chunk=size,
            spool=spool,
        )


def _depths(ring_depth: int | None) -> list[int]:
    return [ring_depth] if ring_depth else [USUAL_DEPTH, 2, 1]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _halvings(rows: int) -> list[int]:
    sizes = [rows]
    while rows > 1:
        rows = -(-rows // 2)
        sizes.append(rows)
    return sizes


def budgets(machine: Machine, free_disk_bytes: int | None = None) -> dict[Place, int | None]:
    """The bytes each place may hold; None where nothing limits it."""
    return {
        "card": machine.device_budget_bytes,
        "pinned": machine.pinned_budget_bytes,
        "host": machine.host_budget_bytes,
        "disk": free_disk_bytes,
    }


def host_total_bytes(plan: Plan) -> int:
    """All that lies in host memory: pinned memory too, and without a card also what would lie on it."""
    return sum(plan.held_bytes(place) for place in _in_host_memory(plan))


def _in_host_memory(plan: Plan) -> tuple[Place, ...]:
    return ("pinned", "host") if plan.machine.has_card else ("card", "pinned", "host")


def _overruns(plan: Plan, free_disk_bytes: int | None) -> list[Place]:
    found: list[Place] = []
    limits = budgets(plan.machine, free_disk_bytes)
    # Without a card all of it is host memory: that budget is the one to speak of.
    order: tuple[Place, ...] = PLACES if plan.machine.has_card else ("host", "card", "pinned", "disk")
    for place, budget in ((place, limits[place]) for place in order):
        held = host_total_bytes(plan) if place == "host" else plan.held_bytes(place)
        if budget is not None and held > budget:
            found.append(place)
    return found


def _refusal(plan: Plan, free_disk_bytes: int | None) -> DoesNotFit:
    place = _overruns(plan, free_disk_bytes)[0]
    held = host_total_bytes(plan) if place == "host" else plan.held_bytes(place)
    budget = budgets(plan.machine, free_disk_bytes)[place]
    assert budget is not None
    counted = _in_host_memory(plan) if place == "host" else (place,)
    parts = sorted((e for e in plan.ledger if e.place in counted and e.num_bytes), key=lambda e: -e.num_bytes)
    total = " + ".join(f"{entry.name} {show_bytes(entry.num_bytes)}" for entry in parts)
    where = {"card": "on the card", "pinned": "pinned", "host": "in host memory", "disk": "on disk"}[place]
    remedy = {
        "card": "raise --device-budget, shorten --seq-len, or name a recipe with a fused attention kernel",
        "pinned": "raise --pinned-budget, or lower --ring-depth",
        "host": "raise --host-budget, use --on-the-fly, --output none or a file, or watch fewer rows",
        "disk": "free some space, or choose another disk for --output",
    }[place]
    if plan.chunk is not None and place == "card":
        remedy = "raise --device-budget, or let the plan choose --chunk and --ring-depth"
    if parts[0].name == "dense scores":
        remedy = "name a recipe with a fused attention kernel (cudnn, flash, efficient, fa4), or shorten --seq-len"
    parcel = _counted(plan.slice_rows, "row") if plan.chunk is None else f"chunks of {plan.chunk:,} positions"
    return DoesNotFit(
        f"{parcel} of case {plan.case.name} at depth {plan.ring_depth} "
        f"need {show_bytes(held)} {where}, the budget is {show_bytes(budget)} ({total})",
        hint=remedy,
    )
