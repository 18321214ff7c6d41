"""Turns case, machine and recipe into a cut, a depth and a ledger, or refuses with the sum. Pure; no torch.

Takes    what, where and how.
Gives    a `Plan`: how much at a time, and every byte it will hold, by name and place.
Knows nothing of files' contents, streams or kernels.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from frontier.case import Case
from frontier.errors import DoesNotFit, Unsupported
from frontier.layers.costs import (
    ALLOCATOR_SLACK_BYTES,
    GEMM_WORKSPACE_BYTES,
    most_rows_per_call,
    weight_bytes,
    workspace_bytes,
)
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.recipe import REFERENCE, Recipe
from frontier.units import GIB, show_bytes

Place = Literal["card", "pinned", "host", "disk"]
PLACES: tuple[Place, ...] = ("card", "pinned", "host", "disk")

# Three slots: one being read or written, one on its way over the link, one at work. Two lose the overlap of
# reading with writing; more than three hold memory for nothing while reads keep up.
USUAL_DEPTH = 3

# Tokens of a slice, with a card and without: long enough that launches and calls cost nothing beside the work;
# more rows would only hold more memory and leave fewer slices to overlap.
USUAL_SLICE_TOKENS = {True: 131_072, False: 4_096}

# Python, torch and CUDA's libraries in host memory, with a card and without: the peak RSS of case 14 less all that
# the ledger names is 1.05 GiB with cuDNN and 1.32 GiB with FA4 (H200 host, torch 2.11), 0.5 GiB on a CPU.
RUNTIME_HOST_BYTES = {True: int(1.4 * GIB), False: int(0.6 * GIB)}


class Entry(NamedTuple):
    """Bytes held under one name in one place for the length of a run."""

    name: str
    place: Place
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a case will be carried out on a machine, and the bytes it will hold."""

    case: Case
    machine: Machine
    recipe: Recipe
    slice_rows: int
    ring_depth: int
    ledger: tuple[Entry, ...]

    @property
    def num_slices(self) -> int:
        return -(-self.case.batch_size // self.slice_rows)

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
            "slice_rows": self.slice_rows,
            "num_slices": self.num_slices,
            "ring_depth": self.ring_depth,
            "planned_bytes": {place: self.held_bytes(place) for place in PLACES},
            "ledger": [entry._asdict() for entry in self.ledger],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a run keeps on the host or disk besides its ring; part of the ledger."""

    resident_input: bool = False
    output: Literal["file", "memory", "none"] = "none"
    watch: tuple[int, ...] = ()
    masked: bool = False


def plan(
    case: Case,
    machine: Machine,
    recipe: Recipe,
    keeping: Keeping = Keeping(),  # frozen
    *,
    ring_depth: int | None = None,
    slice_rows: int | None = None,
    free_disk_bytes: int | None = None,
) -> Plan:
    """The cut and depth that fit every budget: the deepest usual ring first, then the longest usual slices.

    Raises   CaseError if a watched row is none of the case's; DoesNotFit with the sum of the smallest plan
             tried; Unsupported if one row is too long for the kernels' 32-bit offsets.
    """
    case.check_watched(keeping.watch)
    most_rows = min(most_rows_per_call(case), case.batch_size)
    if most_rows < 1:
        raise Unsupported(
            f"one row of case {case.name} has {3 * case.seq_len * case.d_model:,} elements of q, k and v; "
            f"kernels address {2**31 - 1:,}",
            hint="shorten --seq-len",
        )
    usual_rows = min(most_rows, max(1, USUAL_SLICE_TOKENS[machine.has_card] // case.seq_len))
    if slice_rows and min(slice_rows, case.batch_size) > most_rows:
        raise Unsupported(
            f"a slice of {slice_rows} rows of case {case.name} has "
            f"{3 * slice_rows * case.seq_len * case.d_model:,} elements "
            f"of q, k and v; kernels address {2**31 - 1:,}",
            hint=f"take {most_rows} rows a slice at most",
        )
    depths = [ring_depth] if ring_depth else [d for d in (USUAL_DEPTH, 2, 1)]
    sizes = [min(slice_rows, most_rows)] if slice_rows else _halvings(usual_rows)
    tried: Plan | None = None
    for depth in depths:
        for rows in sizes:
            num_slices = -(-case.batch_size // rows)
            tried = Plan(
                case=case,
                machine=machine,
                recipe=recipe,
                slice_rows=rows,
                ring_depth=depth if ring_depth else min(depth, num_slices),
                ledger=(),
            )
            tried = _with_ledger(tried, keeping)
            if not _overruns(tried, free_disk_bytes):
                return tried
    assert tried is not None
    raise _refusal(tried, free_disk_bytes)


def _halvings(rows: int) -> list[int]:
    sizes = [rows]
    while rows > 1:
        rows = -(-rows // 2)
        sizes.append(rows)
    return sizes


def _with_ledger(plan: Plan, keeping: Keeping) -> Plan:
    case, depth, rows = plan.case, plan.ring_depth, plan.slice_rows
    slice_bytes = rows * case.row_bytes
    card = plan.machine.has_card
    entries = [
        Entry("weights", "card", weight_bytes(case, plan.recipe)),
        Entry(f"{depth} x slice in", "card", depth * slice_bytes),
        Entry(f"{depth} x slice out", "card", depth * slice_bytes),
        *(Entry(name, "card", held) for name, held in workspace_bytes(case, plan.recipe, rows).items()),
        Entry(f"{depth} x slice in", "pinned", depth * slice_bytes),
        Entry(f"{depth} x slice out", "pinned", depth * slice_bytes),
        Entry("weights in float32", "host", weight_bytes(case, REFERENCE)),
        Entry("Python, torch, libraries", "host", RUNTIME_HOST_BYTES[card]),
    ]
    if card:
        entries.append(Entry("GEMM workspaces", "card", GEMM_WORKSPACE_BYTES))
        entries.append(Entry("allocator slack", "card", ALLOCATOR_SLACK_BYTES))
        entries.append(Entry("CUDA context", "card", CONTEXT_BYTES))
    if keeping.masked:
        entries.append(Entry("a row without its invalid tokens", "card", case.row_bytes))
    if keeping.resident_input:
        entries.append(Entry("resident input", "host", case.input_bytes))
    if keeping.watch:
        count = len(keeping.watch)
        entries.append(Entry(f"{count} watched row{'s' * (count > 1)}", "host", count * case.row_bytes))
    if keeping.output == "memory":
        entries.append(Entry("output", "host", case.input_bytes))
    if keeping.output == "file":
        entries.append(Entry("output", "disk", case.input_bytes))
    return Plan(
        case=case, machine=plan.machine, recipe=plan.recipe, slice_rows=rows, ring_depth=depth, ledger=tuple(entries)
    )


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
    if parts[0].name == "dense scores":
        remedy = "name a recipe with a fused attention kernel (cudnn, flash, efficient, fa4), or shorten --seq-len"
    return DoesNotFit(
        f"{plan.slice_rows} row{'s' * (plan.slice_rows > 1)} of case {plan.case.name} at depth {plan.ring_depth} "
        f"need {show_bytes(held)} {where}, the budget is {show_bytes(budget)} ({total})",
        hint=remedy,
    )
