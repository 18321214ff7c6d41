"""How long a plan will take and what bounds it, from records of this card or from a short probe.

Takes    a plan and records.
Gives    seconds, the wall, and what the guess rests on.
Knows nothing of kernels; imports torch only to probe.
"""

import math
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

from frontier.case import FLOAT32_BYTES
from frontier.layers.costs import TILE_TOKENS, keys_bytes
from frontier.planner import Plan
from frontier.record import Record

# Of a plain matmul's rate, what a stack with attention reaches when no record tells: 0.60 with cuDNN and 0.68
# with FA4 on an H200, about 0.5 on a laptop CPU.
_SHARE_OF_MATMUL = 0.5
_PROBE_SIZE = 1024
# A pinned copy each way, and a thread's normal numbers, where no record tells.
_LINK_BYTES_PER_S = 12e9
_NORMALS_PER_S = 120e6
# Kernels that a layer launches once and once a tile, and what a launch costs at least: small shapes wait for these.
_LAUNCHES_A_LAYER, _LAUNCHES_A_TILE, _LAUNCHES_A_MEETING, _LAUNCH_S = 3, 14, 20, 5e-6


class Estimate(NamedTuple):
    """Seconds of one pass, the verb that bounds it, and the basis of the guess."""

    pass_s: float
    bound_by: str
    basis: str


def estimate(plan: Plan, records: Iterable[Record], on_the_fly: bool) -> Estimate:
    """The slowest of computing, the link and generating; what the others take is hidden behind it."""
    record = _nearest_record(plan, records)
    if record is not None:
        rate = record.flops / statistics.median(record.card_s)
        basis = f"a record of case {record.case['name']} on this card: {rate / 1e12:.3g} TFLOP/s"
    else:
        rate = _SHARE_OF_MATMUL * _probe_matmul(plan)
        basis = f"half of a short matmul probe: {rate / 1e12:.3g} TFLOP/s; no record of this card and recipe"
    case = plan.case
    values = case.input_bytes / FLOAT32_BYTES
    parcels, tokens = plan.num_slices, plan.slice_rows * case.seq_len
    meetings, link_bytes = 0, case.input_bytes
    if plan.chunk is not None:
        parcels, tokens = case.batch_size * plan.num_chunks, min(plan.chunk, case.seq_len)
        # Each chunk meets those before it, or all others; where keys wait on the card, all on one side in one call.
        meetings = case.batch_size * case.layers * plan.num_chunks * (plan.num_chunks - 1) // (2 if case.causal else 1)
        if plan.spool != "card":
            link_bytes += meetings * keys_bytes(case, plan.recipe, tokens)
        else:
            meetings = case.batch_size * case.layers * (plan.num_chunks - 1) * (1 if case.causal else 2)
    tiles = -(-tokens // TILE_TOKENS)
    launches = parcels * case.layers * (_LAUNCHES_A_LAYER + tiles * _LAUNCHES_A_TILE) + meetings * _LAUNCHES_A_MEETING
    parts_s = {
        "compute": case.flops / rate,
        "link": link_bytes / _LINK_BYTES_PER_S if plan.machine.has_card else 0.0,
        "generation": values / (_NORMALS_PER_S * plan.machine.cores) if on_the_fly else 0.0,
    }
    if plan.machine.has_card:
        parts_s["launches"] = launches * _LAUNCH_S
    if not plan.machine.has_card:  # generating and computing share the same cores
        return Estimate(sum(parts_s.values()), "compute", basis)
    bound_by = max(parts_s, key=lambda part: parts_s[part])
    # The first slice must arrive before anything can be computed, the last must leave after.
    fill_s = (2 * case.input_bytes / _LINK_BYTES_PER_S + parts_s["generation"]) / parcels
    return Estimate(parts_s[bound_by] + fill_s, bound_by, basis)


def _nearest_record(plan: Plan, records: Iterable[Record]) -> Record | None:
    """The record of this card and recipe with the nearest arithmetic, or None."""
    fits = [
        r
        for r in records
        if r.machine == plan.machine.name and r.recipe == str(plan.recipe) and r.card_s and r.flops and not r.refused
    ]
    return min(fits, key=lambda r: abs(math.log(r.flops / plan.case.flops)), default=None)


def _probe_matmul(plan: Plan) -> float:
    import torch

    from frontier.layers.weights import working_dtype

    a = torch.randn(_PROBE_SIZE, _PROBE_SIZE, device=plan.machine.device).to(working_dtype(plan.recipe))
    rates = []
    for _ in range(5):
        began_s = time.perf_counter()
        float((a @ a)[0, 0])
        rates.append(2 * _PROBE_SIZE**3 / (time.perf_counter() - began_s))
    return max(rates)
