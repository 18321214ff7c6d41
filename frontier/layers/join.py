"""The table of joins: a residual takes what a half layer adds, and is normed for the next.

Takes    the float32 residual of some tokens, what is added to it, a LayerNorm's weights.
Gives    the normed tokens in a precision asked for; the residual, updated in place.
Knows nothing of attention, GEMMs or layers.

Letters  T tokens, D width.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from frontier.case import Case
from frontier.layers.costs import NORM_EPS
from frontier.layers.refusals import Refuses, needs_triton, never
from frontier.layers.weights import Norm
from frontier.machine import Machine
from frontier.recipe import Recipe

# One program of the Triton kernel holds whole tokens in registers: 64 floats a thread at this width.
WIDEST = 16_384


class Joins(Protocol):
    """Adds `added_TD` (None: nothing) to `x_TD` in place; the normed sum as `dtype`.

    `last`   the normed tokens replace the residual, which nothing reads any more; `dtype` is float32 then.
    """

    def __call__(
        self, x_TD: Tensor, added_TD: Tensor | None, norm: Norm, dtype: torch.dtype, last: bool = False
    ) -> Tensor: ...


class Join(NamedTuple):
    """One way to join, and the reason for which it cannot serve a case here, or None."""

    join: Joins
    refuses: Refuses


def torch_join(x_TD: Tensor, added_TD: Tensor | None, norm: Norm, dtype: torch.dtype, last: bool = False) -> Tensor:
    """PyTorch's addition and LayerNorm, float32 statistics."""
    if added_TD is not None:
        x_TD += added_TD
    h_TD = layer_norm(x_TD, norm.weight_D.shape, norm.weight_D, norm.bias_D, NORM_EPS)
    return x_TD.copy_(h_TD) if last else h_TD.to(dtype)


def triton_join(x_TD: Tensor, added_TD: Tensor | None, norm: Norm, dtype: torch.dtype, last: bool = False) -> Tensor:
    """Addition, LayerNorm and cast in one kernel: the residual is read once and written once."""
    from frontier.layers.join_triton import join

    h_TD = x_TD if last else torch.empty(x_TD.shape, dtype=dtype, device=x_TD.device)
    join(x_TD, added_TD, norm.weight_D, norm.bias_D, h_TD, NORM_EPS)
    return h_TD


def _triton_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if case.d_model > WIDEST:
        return f"d_model {case.d_model}, the Triton join holds a token of up to {WIDEST}"
    return needs_triton(case, recipe, machine)


JOIN: dict[str, Join] = {"torch-join": Join(torch_join, never), "triton-join": Join(triton_join, _triton_refuses)}
