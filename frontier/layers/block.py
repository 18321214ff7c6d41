"""The formula of a Transformer layer, written once, in the two halves that attention divides.

Takes    float32 rows, packed weights, a recipe.
Gives    the stack's output in a buffer that the caller owns.
Knows nothing of where rows come from or go.

Letters  B rows, S positions, D width, N tokens (B x S), T tokens of one tile, H heads, K head width,
         V valid positions of one row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.costs import TILE_TOKENS, rows_at_once
from frontier.layers.ffn import FFN, linear
from frontier.layers.join import JOIN
from frontier.layers.launch import Run, eager
from frontier.layers.weights import Layer, Norm, Stack, working_dtype
from frontier.recipe import Recipe
from frontier.spans import cut


def forward(
    x_BSD: Tensor, out_BSD: Tensor, stack: Stack, case: Case, recipe: Recipe, valid_BS: Tensor | None = None
) -> None:
    """The whole stack on some rows, eagerly: reads `x_BSD`, writes `out_BSD`; both float32 on the stack's device.

    Shapes   S may differ from the case's: the layer knows no positions.
    Masks    as `by_rows` has them.
    """
    run = eager(lambda rows_BSD: run_stack(rows_BSD, stack, case, recipe))
    by_rows(x_BSD, out_BSD, run, run, valid_BS)


def by_rows(
    x_BSD: Tensor, out_BSD: Tensor, launched: Run, run: Run, valid_BS: Tensor | None, most_rows: int | None = None
) -> None:
    """Rows through `launched`, as many as fit one tile of tokens at a time, or `most_rows`.

    Order    such rows go through all layers before the next, so that they stay in the card's cache.
    Masks    `valid_BS` is bool, None when all tokens are valid. Invalid tokens are left out of the row and
             their outputs are 0: exact, since nothing but attention looks at another token and the order of
             the rest stays. So no mask tensor exists and every kernel keeps its fast path. Rows without all
             their tokens are of any length: `run` serves them, one by one, since `launched` may serve a shape
             at a time.
    """
    if valid_BS is None or bool(valid_BS.all()):
        for rows in cut(len(x_BSD), most_rows or rows_at_once(x_BSD.shape[1])):
            launched(x_BSD[rows.as_slice()], out_BSD[rows.as_slice()])
        return
    for x_SD, out_SD, valid_S in zip(x_BSD, out_BSD, valid_BS.cpu(), strict=True):
        if bool(valid_S.all()):
            run(x_SD[None], out_SD[None])
            continue
        kept_V = valid_S.nonzero().squeeze(1).to(x_BSD.device)
        x_1VD = x_SD[kept_V][None]
        out_SD.zero_()
        if len(kept_V):
            run(x_1VD, x_1VD)
            out_SD[kept_V] = x_1VD[0]


def run_stack(x_BSD: Tensor, stack: Stack, case: Case, recipe: Recipe) -> None:
    """The whole stack in place, under the recipe's switches of precision."""
    with matmul_precision(recipe):
        run_layers(x_BSD, stack.layers, stack.final_norm, case, recipe)


def run_layers(x_BSD: Tensor, layers: tuple[Layer, ...], last: Norm | None, case: Case, recipe: Recipe) -> None:
    """Pre-norm layers, then the `last` norm if there is one, in place on the float32 residual stream.

    A tile of tokens goes from one attention's context to the next attention's q, k, v in one chain, so that each
    half layer's addition meets the norm that follows it.
    """
    B, S, D = x_BSD.shape
    x_ND = x_BSD.view(B * S, D)
    qkv_N3D = torch.empty(B * S, 3 * D, dtype=working_dtype(recipe), device=x_BSD.device)
    q_BSHK, k_BSHK, v_BSHK = qkv_N3D.view(B, S, 3, case.heads, case.head_width).unbind(2)
    lead_on(x_ND, None, None, qkv_N3D, layers[0] if layers else last, recipe)
    for layer, following in zip(layers, (*layers[1:], last), strict=False):
        context_BSHK = ATTENTION[recipe.attention].attend(q_BSHK, k_BSHK, v_BSHK, case.causal)
        context_ND = context_BSHK.reshape(B * S, D)
        lead_on(x_ND, context_ND, layer, qkv_N3D, following, recipe)
        del context_BSHK, context_ND  # the next attention makes its own


def lead_on(
    x_ND: Tensor,
    context_ND: Tensor | None,
    layer: Layer | None,
    qkv_N3D: Tensor,
    following: Layer | Norm | None,
    recipe: Recipe,
) -> None:
    """From `layer`'s context (None: from the stack's input) to what follows: the next q, k, v, or the last norm."""
    for tile in (tile.as_slice() for tile in cut(len(x_ND), TILE_TOKENS)):
        added_TD = None
        if layer is not None and context_ND is not None:
            added_TD = _half(x_ND[tile], context_ND[tile], layer, recipe)
        _join(x_ND[tile], added_TD, qkv_N3D[tile], following, recipe)


def _half(x_TD: Tensor, context_TD: Tensor, layer: Layer, recipe: Recipe) -> Tensor:
    """A layer behind its attention, but for its last addition, which is returned."""
    join, dtype = JOIN[recipe.join].join, layer.ffn_in.weight_OI.dtype
    h_TD = join(x_TD, linear(context_TD, layer.out), layer.norm2, dtype)
    return linear(FFN[recipe.ffn].hidden(h_TD, layer.ffn_in), layer.ffn_out)


def _join(
    x_TD: Tensor, added_TD: Tensor | None, qkv_T3D: Tensor, following: Layer | Norm | None, recipe: Recipe
) -> None:
    """Join what a layer adds with what follows it: the next layer's norm and projections, the last norm, or nothing."""
    join = JOIN[recipe.join].join
    if isinstance(following, Norm):
        join(x_TD, added_TD, following, torch.float32, last=True)
    elif following is not None:
        h_TD = join(x_TD, added_TD, following.norm1, following.out.weight_OI.dtype)
        for turn, projection in enumerate(following.projections):
            width = projection.weight_OI.shape[0]
            part_TO = qkv_T3D[:, turn * width : (turn + 1) * width]
            if projection.weight_OI.dtype == part_TO.dtype:
                linear(h_TD, projection, out=part_TO)
            else:
                part_TO.copy_(linear(h_TD, projection))
    elif added_TD is not None:
        x_TD += added_TD


@contextmanager
def matmul_precision(recipe: Recipe) -> Iterator[None]:
    """TF32 on for the recipe that names it and off for all others; half-precision sums never in half.

    These are PyTorch's only switches for it and they are global: they are set for some calls, then put back.
    """
    switches = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before, put_back = [getattr(switches, name) for name in names], _set_tf32(recipe.precision == "tf32")
    try:
        for name in names:
            setattr(switches, name, False)
        yield
    finally:
        put_back()
        for name, value in zip(names, before, strict=True):
            setattr(switches, name, value)


def _set_tf32(on: bool) -> Callable[[], None]:
    """Gives what puts back the state before. The old switch refuses to be read once the new ones were used."""
    switches, whole = torch.backends.cuda.matmul, torch.backends
    inherits = switches.fp32_precision == whole.fp32_precision  # type: ignore[attr-defined]
    new = "none" if inherits else switches.fp32_precision
    try:
        old = switches.allow_tf32
    except RuntimeError:
        switches.fp32_precision = "tf32" if on else "ieee"
        return lambda: setattr(switches, "fp32_precision", new)
    word = None
    with suppress(RuntimeError):
        word = torch.get_float32_matmul_precision()
    switches.allow_tf32 = on

    def put_back() -> None:
        switches.allow_tf32 = old
        if word == "medium":  # of which the switch makes "high"
            torch.set_float32_matmul_precision(word)
        switches.fp32_precision = new

    return put_back
