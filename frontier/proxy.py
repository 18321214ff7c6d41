"""The streaming path at a length whose dense float32 reference still fits, judged on every element.

Takes    a case, a machine, a recipe, seeds.
Gives    a verdict per seed, and the length that fits.
Knows nothing of run directories or the referee.

Letters  B rows, S positions, D width.
"""

import dataclasses
from collections.abc import Callable

import torch

from frontier.case import Case
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.errors import DoesNotFit
from frontier.flows.engine import Engine
from frontier.judge.gate import Verdict, compare
from frontier.layers.block import forward, matmul_precision
from frontier.layers.weights import pack, seeded_state
from frontier.machine import Machine
from frontier.planner import Keeping, Plan, plan
from frontier.recipe import REFERENCE, Recipe
from frontier.spans import Span
from frontier.stream.trace import Event

LONGEST = 16_384
_STEP = 1_024


def reference_plan(case: Case, machine: Machine) -> Plan:
    """What the dense reference of one row at a time holds.

    Raises   DoesNotFit with the sum.
    """
    return plan(dataclasses.replace(case, batch_size=1), machine, REFERENCE, ring_depth=1, flow="whole")


def longest_length(case: Case, machine: Machine) -> int:
    """The longest sequence up to 16,384, and to the case's own, whose dense reference fits the budget.

    Raises   DoesNotFit if not even the shortest does.
    """
    lengths = range(min(LONGEST, case.seq_len), 0, -_STEP)
    for seq_len in lengths:
        try:
            reference_plan(dataclasses.replace(case, seq_len=seq_len), machine)
        except DoesNotFit:
            if seq_len == lengths[-1]:
                raise
        else:
            return seq_len
    raise AssertionError(lengths)


def judge_seed(
    case: Case, machine: Machine, recipe: Recipe, watch: Callable[[Event], None] = lambda event: None
) -> Verdict:
    """Stream the whole case, then compare every element with the dense float32 reference on the same device.

    The reference computes row by row, without TF32, from rows generated anew.
    """
    reference_plan(case, machine)
    streamed = plan(case, machine, recipe, Keeping(output="memory"), flow="whole")
    state = seeded_state(case)
    source, sink = SeededSource(case, machine.cores), MemorySink(case)
    with Engine(streamed, state) as engine:
        engine.run_pass(source, sink, watch=watch)
    device = torch.device(machine.device)
    if machine.has_card:
        torch.cuda.empty_cache()
    stack = pack(state, case, REFERENCE, device)
    host_BSD = torch.empty(1, case.seq_len, case.d_model)
    total = Verdict()
    with matmul_precision(REFERENCE):
        for row in range(case.batch_size):
            source.read(Span(row, row + 1), host_BSD)
            reference_BSD = host_BSD.to(device, copy=True)
            forward(reference_BSD, reference_BSD, stack, case, REFERENCE)
            total += compare(sink.host_BSD[row], reference_BSD[0], case.atol, case.rtol, row)
    source.close()
    return total
