"""A recipe made callable on rows that lie on a device, and the reasons for which it would refuse.

Takes    the stack's float32 weights, a case, a recipe, a device.
Gives    a `Program`: reads rows, writes the stack's output; refusals as text.
Knows nothing of slices, lanes or evidence.

Letters  B rows, S positions, D width.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers import stack_cut, tail
from frontier.layers.attention import ATTENTION
from frontier.layers.block import by_rows, matmul_precision, run_layers, run_stack
from frontier.layers.cards import on_device
from frontier.layers.costs import SMALL, both_kinds, most_rows_per_call
from frontier.layers.ffn import FFN
from frontier.layers.join import JOIN
from frontier.layers.launch import LAUNCH, eager
from frontier.layers.refusals import needs_capability
from frontier.layers.stack import StackProgram
from frontier.layers.weights import State, pack, tensors_of
from frontier.machine import Machine
from frontier.recipe import Recipe


class Program(Protocol):
    """The whole stack on some rows: reads `x_BSD`, writes `out_BSD`; both float32 on the program's device.

    Shapes   B and S may differ from the case's.
    Masks    `valid_BS` is bool, None when all tokens are valid; outputs of invalid tokens are 0.
    Order    all work is queued on the current stream; nothing of `x_BSD` is changed.
    """

    def __call__(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None: ...


def refusal(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Why `recipe` cannot serve this case on this machine by its own rules, or None."""
    if recipe.is_one_kernel:
        return stack_cut.refuses(case, recipe, machine)
    if recipe.fusion == "tail" and (reason := tail.refuses(case, recipe, machine)):
        return reason
    parts = (
        _precision_refuses,
        ATTENTION[recipe.attention].refuses,
        JOIN[recipe.join].refuses,
        FFN[recipe.ffn].refuses,
        LAUNCH[recipe.launch].refuses,
    )
    return next((reason for refuses in parts if (reason := refuses(case, recipe, machine))), None)


def _precision_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if recipe.precision == "tf32x3":
        return "only the one kernel for the whole stack multiplies in tf32x3"
    if recipe.held_at_once == "held-output":
        return f"{recipe.held}: only the one kernel for the whole stack holds the output projection alone"
    if recipe.held != "held-none" and not recipe.is_half:
        return f"{recipe.held} keeps GEMMs in float32 beside fp16 or bf16, the precision is {recipe.precision}"
    if recipe.redoes_small and LAUNCH[recipe.launch].traces:
        return f"{recipe.held} asks for small rows at each call, which {recipe.launch} does not trace"
    if recipe.precision in ("tf32", "bf16"):
        return needs_capability(machine, (8, 0))
    return None


def by_part(recipe: Recipe) -> Recipe:
    """The recipe whose parts do what `recipe` does, for looking into it: the same precision, launched plainly."""
    if recipe.is_one_kernel:
        precision = "fp32" if recipe.precision == "tf32x3" else recipe.precision
        return Recipe(precision=precision, projection="packed")
    return replace(recipe, launch="eager", fusion="by-part", held=recipe.held_at_once)


def make_program(state: State, case: Case, recipe: Recipe, device: torch.device) -> Program:
    """Weights cast and packed once, on the device; what is called again and again.

    Raises   whatever a kernel raises that `refusal` would have named.
    """
    if recipe.is_one_kernel:
        return StackProgram(state, case, recipe, device)
    if recipe.redoes_small:
        return _done_again_where_small(state, case, recipe, device)
    return _by_part(state, case, recipe, device)


def _by_part(state: State, case: Case, recipe: Recipe, device: torch.device) -> Program:
    launch = LAUNCH[recipe.launch]
    if recipe.fusion == "tail":
        chain = tail.TailStack(state, case, recipe, device)
        in_place, weights = chain.__call__, [chain.weights, chain.vectors]
        # Two kernels a layer leave nothing to keep in the cache; one call is bounded by its 32-bit offsets alone.
        most_rows: int | None = max(1, most_rows_per_call(case))
    else:
        packed, most_rows = pack(state, case, recipe, device), None
        weights = list(tensors_of(packed))

        def in_place(x_BSD: Tensor) -> None:
            if launch.traces:
                run_layers(x_BSD, packed.layers, packed.final_norm, case, recipe)
            else:
                run_stack(x_BSD, packed, case, recipe)

    launched, plainly = launch.wrap(in_place, weights), eager(in_place)

    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        # Not around a graph's replay, which they would delay by 7 us and change nothing in.
        with on_device(device), matmul_precision(recipe) if launch.traces else nullcontext():
            by_rows(x_BSD, out_BSD, launched, plainly, valid_BS, most_rows)

    return program


def _done_again_where_small(state: State, case: Case, recipe: Recipe, device: torch.device) -> Program:
    """Rows with a small token are done again in float32; batches with invalid tokens are done in it at once."""
    on_card = device.type == "cuda"
    kinds = both_kinds(recipe, "efficient" if on_card else "flash")
    fast, exact = (_by_part(state, case, kind, device) for kind in kinds)
    side = torch.cuda.Stream(device) if on_card else None

    def small_rows(x_BSD: Tensor) -> Tensor:
        return (x_BSD.var(-1, correction=0) < SMALL**2).any(1)

    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        if valid_BS is not None and not bool(valid_BS.all()):
            exact(x_BSD, out_BSD, valid_BS)
            return
        if side is None:
            host_B = small_rows(x_BSD)
            fast(x_BSD, out_BSD)
        else:
            with on_device(device):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):  # beside the stack, which does not wait for it
                    host_B = torch.empty(len(x_BSD), dtype=torch.bool, pin_memory=True)
                    host_B.copy_(small_rows(x_BSD), non_blocking=True)
                    told = side.record_event()
            fast(x_BSD, out_BSD)
            told.synchronize()  # so no caller gets its rows back while they are looked at
        rows_R = host_B.nonzero().flatten().to(device)
        if len(rows_R):
            small_RSD = x_BSD[rows_R]
            exact(small_RSD, small_RSD)
            out_BSD[rows_R] = small_RSD

    return program
