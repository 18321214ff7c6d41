"""The formula of a Transformer layer, written once, in the two halves that attention divides.

Takes    float32 rows, packed weights, a recipe.
Gives    the stack's output in a buffer that the caller owns.
Knows nothing of where rows come from or go.

Letters  B rows, S positions, D width, N tokens (B x S), T tokens of one tile, H heads, K head width,
         V valid positions of one row.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.costs import TILE_TOKENS
from frontier.layers.weights import Layer, Linear, Norm, Stack
from frontier.recipe import Recipe
from frontier.spans import cut

NORM_EPS = 1e-5


def forward(
    x_BSD: Tensor, out_BSD: Tensor, stack: Stack, case: Case, recipe: Recipe, valid_BS: Tensor | None = None
) -> None:
    """The whole stack on some rows: reads `x_BSD`, writes `out_BSD`; both float32 on the stack's device.

    Shapes   S may differ from the case's: the layer knows no positions.
    Masks    `valid_BS` is bool on the host, None when all tokens are valid. Invalid tokens are left out of
             the row and their outputs are 0: exact, since nothing but attention looks at another token and
             the order of the rest stays. So no mask tensor exists and every kernel keeps its fast path.
    """
    if valid_BS is None or bool(valid_BS.all()):
        _forward_valid(x_BSD, out_BSD, stack, case, recipe)
        return
    for x_SD, out_SD, valid_S in zip(x_BSD, out_BSD, valid_BS, strict=True):
        if bool(valid_S.all()):
            _forward_valid(x_SD[None], out_SD[None], stack, case, recipe)
            continue
        out_SD.zero_()
        kept_V = valid_S.nonzero().squeeze(1).to(x_BSD.device)
        if len(kept_V):
            x_VD = x_SD[kept_V]
            _forward_valid(x_VD[None], x_VD[None], stack, case, recipe)
            out_SD[kept_V] = x_VD


def _forward_valid(x_BSD: Tensor, out_BSD: Tensor, stack: Stack, case: Case, recipe: Recipe) -> None:
    # The output buffer carries the residual stream, so no third float32 copy of a slice exists.
    if out_BSD.data_ptr() != x_BSD.data_ptr():
        out_BSD.copy_(x_BSD)
    for layer in stack.layers:
        block(out_BSD, layer, case, recipe)
    final_norm(out_BSD, stack.final_norm)


def block(x_BSD: Tensor, layer: Layer, case: Case, recipe: Recipe) -> None:
    """One pre-norm layer, in place on the float32 residual stream."""
    B, S, D = x_BSD.shape
    x_ND = x_BSD.view(B * S, D)
    tiles = list(cut(B * S, TILE_TOKENS))
    dtype = layer.out.weight_OI.dtype

    qkv_N3D = torch.empty(B * S, 3 * D, dtype=dtype, device=x_BSD.device)
    for tile in tiles:
        h_TD = _norm(x_ND[tile.as_slice()], layer.norm1).to(dtype)
        for turn, projection in enumerate(layer.projections):
            width = projection.weight_OI.shape[0]
            _linear(h_TD, projection, out=qkv_N3D[tile.as_slice(), turn * width : (turn + 1) * width])

    q_BSHK, k_BSHK, v_BSHK = qkv_N3D.view(B, S, 3, case.heads, case.head_width).unbind(2)
    context_BSHK = ATTENTION[recipe.attention].attend(q_BSHK, k_BSHK, v_BSHK, case.causal)
    context_ND = context_BSHK.reshape(B * S, D)

    for tile in tiles:
        x_TD = x_ND[tile.as_slice()]
        x_TD += _linear(context_ND[tile.as_slice()], layer.out)
        h_TD = _norm(x_TD, layer.norm2).to(dtype)
        x_TD += _linear(gelu(_linear(h_TD, layer.ffn_in)), layer.ffn_out)


def final_norm(x_BSD: Tensor, norm: Norm) -> None:
    """The LayerNorm that ends the stack, in place."""
    x_ND = x_BSD.view(-1, x_BSD.shape[-1])
    for tile in cut(len(x_ND), TILE_TOKENS):
        x_ND[tile.as_slice()] = _norm(x_ND[tile.as_slice()], norm)


def _norm(x_TD: Tensor, norm: Norm) -> Tensor:
    return layer_norm(x_TD, norm.weight_D.shape, norm.weight_D, norm.bias_D, NORM_EPS)


def _linear(h_TI: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    return torch.addmm(linear.bias_O, h_TI, linear.weight_OI.t(), out=out)


@contextmanager
def matmul_precision(recipe: Recipe) -> Iterator[None]:
    """TF32 on for the recipe that names it and off for all others; half-precision sums never in half.

    These are PyTorch's only switches for it and they are global: they are set for a run, then put back.
    """
    switches = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(switches, name) for name in names]
    try:
        for name, value in zip(names, (recipe.precision == "tf32", False, False), strict=True):
            setattr(switches, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(switches, name, value)
