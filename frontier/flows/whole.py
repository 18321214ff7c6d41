"""Rows that fit: one stream whose work is the layer stack.

Takes    a plan, a stack's weights, perhaps a mask.
Gives    the slices of a batch, what each verb does with one, and the place where a number that is not finite began.
Knows nothing of files, journals or records.

Letters  B rows, S positions, D width.
"""

import math
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from frontier.data.protocols import Sink, Source
from frontier.data.watch import Watcher
from frontier.layers.block import run_layers
from frontier.layers.program import by_part, make_program
from frontier.layers.weights import State, pack
from frontier.planner import Plan
from frontier.spans import Span, cut, without
from frontier.stream.lanes import Lanes
from frontier.stream.pipeline import lend_slot
from frontier.stream.ring import Slot


class Fault(NamedTuple):
    """Where a row stops being finite: behind a layer, or already in its input, where `layer` is None."""

    layer: str | None
    position: int
    channel: int
    value: float


class WholeRows:
    """The layer stack as the work of one slice. `valid_BS` is the whole batch's mask on the host, or None."""

    def __init__(self, plan: Plan, state: State, valid_BS: Tensor | None = None) -> None:
        self.plan, self.valid_BS, self._state = plan, valid_BS, state
        self._device = torch.device(plan.machine.device)
        self.program = make_program(state, plan.case, plan.recipe, self._device)
        self.slot_shape: tuple[int, ...] = (plan.slice_rows, plan.case.seq_len, plan.case.d_model)

    def open(self, folder: Path) -> None:
        """Nothing: a slice's buffers are its slot."""

    def close(self) -> None:
        """Nothing was opened."""

    def loads(self, done_rows: Container[int] = ()) -> Iterator[Span]:
        """The slices of all rows that are not done yet."""
        return without(cut(self.plan.case.batch_size, self.plan.slice_rows), done_rows)

    def rows_of(self, load: Span) -> Span:
        return load

    lend = staticmethod(lend_slot)

    def read(self, load: Span, pinned_in_BSD: Tensor, source: Source, watcher: Watcher | None) -> None:
        source.read(load, pinned_in_BSD)
        if watcher is not None:
            watcher.saw_input(load, pinned_in_BSD)

    def write(self, load: Span, pinned_out_BSD: Tensor, sink: Sink, watcher: Watcher | None) -> None:
        sink.write(load, pinned_out_BSD)
        if watcher is not None:
            watcher.saw_output(load, pinned_out_BSD)

    def work(self, rows: Span, device_in_BSD: Tensor, device_out_BSD: Tensor, device_note: Tensor) -> None:
        """Compute a slice's output; note lowest and highest input, lowest and highest output.

        A NaN or infinity anywhere shows in these four numbers. They cost 0.1 ms a gigabyte-pass on an H200.
        """
        torch.aminmax(device_in_BSD, out=(device_note[0], device_note[1]))
        valid_BS = None if self.valid_BS is None else self.valid_BS[rows.as_slice()]
        self.program(device_in_BSD, device_out_BSD, valid_BS)
        torch.aminmax(device_out_BSD, out=(device_note[2], device_note[3]))

    def find_fault(self, row: int, source: Source, slot: Slot, lanes: Lanes) -> Fault | None:
        """Where a row stops being finite, if it does. After the stream has ended; uses one slot of its ring.

        Runs the row again, layer by layer, with the code of the run's recipe by part; the norm behind them is a
        place of its own.
        """
        case, recipe = self.plan.case, by_part(self.plan.recipe)
        source.read(Span(row, row + 1), slot.pinned_in_BSD[:1])
        slot.device_in_BSD[:1].copy_(slot.pinned_in_BSD[:1])
        x_SD = slot.device_in_BSD[0]
        place = first_nonfinite(x_SD)
        if place is not None:
            return Fault(None, *place, float(x_SD[place]))
        valid_S = torch.ones(case.seq_len, dtype=torch.bool) if self.valid_BS is None else self.valid_BS[row]
        kept_V = valid_S.nonzero().squeeze(1)
        stack = pack(self._state, case, recipe, self._device)
        x_BSD = x_SD[kept_V.to(x_SD.device)][None]  # a copy, which the layers may change
        for turn in range(len(stack.layers) + 1):
            if turn < len(stack.layers):
                name = f"layer {turn}"
                run_layers(x_BSD, (stack.layers[turn],), None, case, recipe)
            else:
                name = "final_norm"
                run_layers(x_BSD, (), stack.final_norm, case, recipe)
            place = first_nonfinite(x_BSD[0])
            if place is not None:
                return Fault(name, int(kept_V[place[0]]), place[1], float(x_BSD[0][place]))
        return None


def copy_work(load: Span, device_in_BSD: Tensor, device_out_BSD: Tensor, device_note: Tensor) -> None:
    """Work that only copies: what is left of a run is its road."""
    common = min(device_in_BSD.numel(), device_out_BSD.numel())  # a step may bring nothing up, or down
    device_out_BSD.view(-1)[:common].copy_(device_in_BSD.view(-1)[:common])
    device_note.zero_()


def input_is_finite(note: Tensor) -> bool:
    return all(math.isfinite(float(value)) for value in note[:2])


def output_is_finite(note: Tensor) -> bool:
    return all(math.isfinite(float(value)) for value in note[2:])


def first_nonfinite(x_SD: Tensor) -> tuple[int, int] | None:
    """(position, channel) of the first NaN or infinity of one row, or None."""
    for position in (~torch.isfinite(x_SD).all(dim=1)).nonzero().flatten().tolist()[:1]:
        channel = int((~torch.isfinite(x_SD[position])).nonzero()[0])
        return int(position), channel
    return None
