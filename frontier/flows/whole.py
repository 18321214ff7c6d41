"""Rows that fit: one stream whose work is the layer stack.

Takes    a plan, a program, perhaps a mask.
Gives    the work of a slice, and the place where a number that is not finite began.
Knows nothing of files, journals or records.

Letters  B rows, S positions, D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.block import run_layers
from frontier.layers.program import Program
from frontier.layers.weights import Stack
from frontier.planner import Plan
from frontier.recipe import Recipe
from frontier.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows:
    """The layer stack as the work of one slice. `valid_BS` is the whole batch's mask on the host, or None."""

    plan: Plan
    program: Program
    valid_BS: Tensor | None = None

    def work(self, rows: Span, device_in_BSD: Tensor, device_out_BSD: Tensor, device_note: Tensor) -> None:
        """Compute a slice's output; note lowest and highest input, lowest and highest output.

        A NaN or infinity anywhere shows in these four numbers. They cost 0.1 ms a gigabyte-pass on an H200.
        """
        torch.aminmax(device_in_BSD, out=(device_note[0], device_note[1]))
        valid_BS = None if self.valid_BS is None else self.valid_BS[rows.as_slice()]
        self.program(device_in_BSD, device_out_BSD, valid_BS)
        torch.aminmax(device_out_BSD, out=(device_note[2], device_note[3]))


def copy_work(rows: Span, device_in_BSD: Tensor, device_out_BSD: Tensor, device_note: Tensor) -> None:
    """Work that only copies: what is left of a run is its road."""
    device_out_BSD.copy_(device_in_BSD)
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


def where_it_began(
    x_SD: Tensor, stack: Stack, case: Case, recipe: Recipe, valid_S: Tensor | None
) -> tuple[str, int] | None:
    """(layer, position) where a row with finite input first stops being finite, or None if it never does.

    Runs the row again, layer by layer, with the code of the run's recipe by part; the norm behind them is a place
    of its own.
    """
    kept_V = torch.arange(len(x_SD)) if valid_S is None else valid_S.nonzero().squeeze(1)
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
            return name, int(kept_V[place[0]])
    return None
