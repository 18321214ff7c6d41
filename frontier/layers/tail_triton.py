"""The Triton kernel for all that lies between two attentions, and nothing but the kernel.

Takes    a tile's float32 residual and its attention's context, the weights of one layer's end and the next's start.
Gives    the residual of the next layer and its q, k, v; at the end of the stack its output.
Knows nothing of attention, tables or launches.

Weights are folded as for the whole stack in one kernel (`stack.py`), but for the softmax scale.

Letters  D width, F feed-forward width, M tokens of a tile, C columns at a time.
"""

import triton
import triton.language as tl

from frontier.layers.tile_arithmetic import fed_forward, matrix, standardised


@triton.jit
def tail_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    context_ptr,
    out_ptr,
    qkv_ptr,
    weights_ptr,
    vectors_ptr,
    tokens,
    layer,
    L: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    PLACE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """One tile of M tokens of `[tokens, D]`; grid `(ceil(tokens / M),)`.

    x, out    float32 [tokens, D], the residual before and behind; they may be one tensor
    context   [tokens, D] of this layer's attention; qkv [tokens, 3D] of the next layer's
    weights, vectors, layer, SPLIT   as `stack_kernel` has them
    PLACE     "first": only the projections of layer 0; "middle"; "last": the stack's output, no projections
    """
    gemm = weights_ptr.dtype.element_ty
    LAYER_WEIGHTS: tl.constexpr = 4 * D * D + (4 if SPLIT else 2) * D * F
    LAYER_VECTORS: tl.constexpr = 5 * D + F
    token_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    real_M = token_M < tokens
    columns_D = tl.arange(0, D)
    at_MD = token_M[:, None] * D + columns_D[None, :]
    x_MD = tl.load(x_ptr + at_MD, mask=real_M[:, None], other=0.0)
    w_ptr = weights_ptr + layer * LAYER_WEIGHTS
    v_ptr = vectors_ptr + layer * LAYER_VECTORS
    if PLACE != "first":
        context_MD = tl.load(context_ptr + at_MD, mask=real_M[:, None], other=0.0)
        x_MD = tl.dot(context_MD, matrix(w_ptr + 3 * D * D, D, D), x_MD, input_precision="ieee")
        x_MD += tl.load(v_ptr + 3 * D + columns_D)[None, :]
        x_MD = fed_forward(x_MD, w_ptr, v_ptr, D, F, M, C, SPLIT, "ieee", STAGES, EPS, FAST)
        w_ptr += LAYER_WEIGHTS
        v_ptr += LAYER_VECTORS
    h_MD = standardised(x_MD, D, EPS)
    if PLACE == "last":
        y_MD = h_MD * tl.load(v_ptr + columns_D)[None, :] + tl.load(v_ptr + D + columns_D)[None, :]
        tl.store(out_ptr + at_MD, y_MD, mask=real_M[:, None])
    else:
        if PLACE == "middle":
            tl.store(out_ptr + at_MD, x_MD, mask=real_M[:, None])
        own_ptr = qkv_ptr + token_M[:, None] * (3 * D) + columns_D[None, :]
        for part in tl.range(0, 3, num_stages=STAGES):
            p_MD = tl.dot(h_MD.to(gemm), matrix(w_ptr + part * D * D, D, D), input_precision="ieee")
            p_MD += tl.load(v_ptr + part * D + columns_D)[None, :]
            tl.store(own_ptr + part * D, p_MD.to(gemm), mask=real_M[:, None])
