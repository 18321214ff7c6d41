"""The bytes that a run holds, by name and place: of whole rows, or of rows cut into chunks. No torch.

Takes    what, where and how; rows of a slice or positions of a chunk; the depth of the ring.
Gives    entries, which a plan adds up.
Knows nothing of budgets.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from frontier.case import BLOCK_POSITIONS, FLOAT32_BYTES, Case
from frontier.layers.costs import (
    ALLOCATOR_SLACK_BYTES,
    ALLOCATOR_SLACK_SHARE,
    GEMM_WORKSPACE_BYTES,
    chunk_floats,
    chunk_workspace_bytes,
    spool_bytes,
    weight_bytes,
    workspace_bytes,
)
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.recipe import REFERENCE, Recipe
from frontier.units import GIB

Place = Literal["card", "pinned", "host", "disk"]
PLACES: tuple[Place, ...] = ("card", "pinned", "host", "disk")
Spool = Literal["card", "pinned", "host", "disk"]
CONTEXT = "CUDA context"
INPUTS_AHEAD = 2  # inputs of chunks that are read while one is worked on
SPOOL = "spool.bin"  # in the run directory, where it may outlive a run that is killed

# Python, torch and CUDA's libraries in host memory, with a card and without: the peak RSS of case 14 less all that
# the ledger names is 1.05 GiB with cuDNN and 1.32 GiB with FA4 (H200 host, torch 2.11), 0.5 GiB on a CPU.
RUNTIME_HOST_BYTES = {True: int(1.4 * GIB), False: int(0.6 * GIB)}


class Entry(NamedTuple):
    """Bytes held under one name in one place for the length of a run."""

    name: str
    place: Place
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a run keeps on the host or disk besides its ring; part of the ledger."""

    resident_input: bool = False
    drawn_input: bool = False  # seeded, and drawn while the run goes on
    output: Literal["file", "memory", "none"] = "none"
    watch: tuple[int, ...] = ()
    masked: bool = False


NOTHING_KEPT = Keeping()


def whole_rows(
    case: Case, machine: Machine, recipe: Recipe, keeping: Keeping, depth: int, rows: int
) -> tuple[Entry, ...]:
    """Of slices of whole rows."""
    entries = [
        *_slots(depth, "slice", rows * case.row_bytes),
        *(Entry(name, "card", held) for name, held in workspace_bytes(case, recipe, rows).items()),
        *_always(case, machine, recipe, keeping),
    ]
    if keeping.masked:
        entries.append(Entry("a row without its invalid tokens", "card", case.row_bytes))
    return (*entries, *_slack(entries, machine))


def chunked_rows(
    case: Case, machine: Machine, recipe: Recipe, keeping: Keeping, depth: int, chunk: int, spool: Spool
) -> tuple[Entry, ...]:
    """Of rows cut into chunks, whose keys and values wait in `spool`."""
    positions, ahead = min(chunk, case.seq_len), inputs_ahead(case, depth, keeping.masked)
    entries = [
        *_slots(depth, "chunk", positions * chunk_floats(case, recipe) * FLOAT32_BYTES),
        *(Entry(name, "card", held) for name, held in chunk_workspace_bytes(case, recipe, chunk).items()),
        Entry("keys and values of a row", spool, spool_size(case, recipe, spool)),
        Entry(f"{ahead} x input read ahead", "pinned", ahead * positions * case.d_model * FLOAT32_BYTES),
        *_always(case, machine, recipe, keeping),
    ]
    if keeping.masked:
        held = positions * case.d_model * FLOAT32_BYTES
        entries.append(Entry("a chunk without its invalid tokens", "card", held))
    if keeping.drawn_input:
        ahead_bytes = machine.cores * BLOCK_POSITIONS * case.d_model * FLOAT32_BYTES  # one for each thread
        entries.append(Entry("blocks drawn ahead", "host", min(ahead_bytes, case.row_bytes)))
    return (*entries, *_slack(entries, machine))


def _slack(entries: list[Entry], machine: Machine) -> list[Entry]:
    asked = sum(entry.num_bytes for entry in entries if entry.place == "card" and entry.name != CONTEXT)
    most = max(ALLOCATOR_SLACK_BYTES, int(asked * ALLOCATOR_SLACK_SHARE))
    return [Entry("allocator slack", "card", most)] if machine.has_card else []


def inputs_ahead(case: Case, depth: int, masked: bool) -> int:
    """Buffers for the inputs of chunks: those of as many steps as the ring is deep, and of the chunks behind them."""
    # Between two inputs of a causal stack lie the other layers and the output; with a mask perhaps the output alone.
    steps_apart = 1 if not case.causal else 2 if masked else case.layers + 1
    return INPUTS_AHEAD + -(-depth // steps_apart)


def residuals_spooled(case: Case, spool: Spool | None) -> int:
    """How many of a row the spool holds at once: in a file none is written over the one that it was made of."""
    return 2 if spool == "disk" and not case.causal and case.layers > 2 else 1


def spool_size(case: Case, recipe: Recipe, spool: Spool | None) -> int:
    """Bytes of keys and values of a row, and of the residuals that wait beside them."""
    return spool_bytes(case, recipe) + (residuals_spooled(case, spool) - 1) * case.row_bytes


def _slots(depth: int, what: str, num_bytes: int) -> list[Entry]:
    places: tuple[Place, ...] = ("card", "pinned")
    return [Entry(f"{depth} x {what} {way}", place, depth * num_bytes) for place in places for way in ("in", "out")]


def _always(case: Case, machine: Machine, recipe: Recipe, keeping: Keeping) -> list[Entry]:
    card = machine.has_card
    entries = [
        Entry("weights", "card", weight_bytes(case, recipe)),
        Entry("weights in float32", "host", weight_bytes(case, REFERENCE)),
        Entry("Python, torch, libraries", "host", RUNTIME_HOST_BYTES[card]),
    ]
    if card:
        entries.append(Entry("GEMM workspaces", "card", GEMM_WORKSPACE_BYTES))
        entries.append(Entry(CONTEXT, "card", CONTEXT_BYTES))
    if keeping.resident_input:
        entries.append(Entry("resident input", "host", case.input_bytes))
    if keeping.watch:
        count = len(keeping.watch)
        entries.append(Entry(f"{count} watched row{'s' * (count > 1)}", "host", count * case.row_bytes))
    if keeping.output == "memory":
        entries.append(Entry("output", "host", case.input_bytes))
    if keeping.output == "file":
        entries.append(Entry("output", "disk", case.input_bytes))
    return entries
