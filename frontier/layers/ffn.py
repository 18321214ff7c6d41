"""The table of a feed-forward network's first half: GEMM, bias and gelu.

Takes    normed tokens, a Linear's weights.
Gives    gelu(h W^T + b) in the tokens' precision; gelu is the exact erf form.
Knows nothing of residuals, norms or the second GEMM.

Letters  T tokens, I inputs, O outputs, D width, F feed-forward width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from frontier.case import Case
from frontier.layers.costs import is_held
from frontier.layers.refusals import Refuses, needs_triton, never
from frontier.layers.weights import Linear
from frontier.machine import Machine
from frontier.recipe import Recipe


class Ffn(NamedTuple):
    """One way to compute the hidden units, and the reason for which it cannot serve a case here, or None."""

    hidden: Callable[[Tensor, Linear], Tensor]
    refuses: Refuses


def linear(h_TI: Tensor, weights: Linear, out: Tensor | None = None) -> Tensor:
    """h W^T + b by a library's GEMM, in the precision of the weights."""
    return torch.addmm(weights.bias_O, h_TI.to(weights.weight_OI.dtype), weights.weight_OI.t(), out=out)


def torch_hidden(h_TD: Tensor, weights: Linear) -> Tensor:
    """A library's GEMM with its bias, then a kernel for gelu."""
    return gelu(linear(h_TD, weights))


def triton_hidden(h_TD: Tensor, weights: Linear) -> Tensor:
    """One kernel: bias and gelu on the GEMM's float32 accumulators, rounded once."""
    from frontier.layers.ffn_triton import gelu_linear

    out_TF = torch.empty(len(h_TD), len(weights.weight_OI), dtype=h_TD.dtype, device=h_TD.device)
    gelu_linear(h_TD, weights.weight_OI, weights.bias_O, out_TF)
    return out_TF


def _triton_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if not recipe.is_half or is_held(recipe, "ffn"):
        kept = recipe.held if recipe.is_half else f"precision {recipe.precision}"
        return f"the feed-forward GEMMs are float32 ({kept}), the Triton one needs fp16 or bf16"
    if case.d_model % 8 or case.ffn_dim % 8:
        return f"d_model {case.d_model} and ffn_dim {case.ffn_dim}, the Triton GEMM needs multiples of 8"
    return needs_triton(case, recipe, machine)


FFN: dict[str, Ffn] = {"torch-ffn": Ffn(torch_hidden, never), "triton-ffn": Ffn(triton_hidden, _triton_refuses)}
