"""Small arithmetic on a tile that Triton kernels share.

Takes    values of one tile, as a kernel holds them.
Gives    values of that tile.
Knows nothing of layers, memory layouts or launches.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def exp2(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    # libdevice's flushes denormals: one instruction instead of four. The interpreter has no libdevice.
    if FAST:
        return libdevice.exp2(x)
    else:
        return tl.exp2(x)


@triton.jit
def inverse(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if FAST:
        return libdevice.fast_dividef(1.0, x)
    else:
        return 1.0 / x


@triton.jit
def spread(x_MD, D: tl.constexpr):  # type: ignore[no-untyped-def]
    # The sum of squares about the mean: D variances.
    centred_MD = x_MD - tl.sum(x_MD, axis=1)[:, None] * (1.0 / D)
    return tl.sum(centred_MD * centred_MD, axis=1)


@triton.jit
def standardised(x_MD, D: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    # LayerNorm without gain and bias, which are folded into the weights that follow.
    mean_M = tl.sum(x_MD, axis=1) * (1.0 / D)
    centred_MD = x_MD - mean_M[:, None]
    variance_M = tl.sum(centred_MD * centred_MD, axis=1) * (1.0 / D)
    return centred_MD * tl.rsqrt(variance_M + EPS)[:, None]


@triton.jit
def gelu(u, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    # u Phi(u) = max(u, 0) - |u| Q(|u|), the exact erf form; Q by Abramowitz and Stegun 7.1.26, wrong by less
    # than 7.5e-8: a third of the instructions of libdevice's erf.
    size = tl.abs(u)
    t = inverse(1.0 + 0.23164189 * size, FAST)
    series = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.maximum(u, 0.0) - size * (series * exp2(u * u * -0.72134752044, FAST))


@triton.jit
def matrix(pointer, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(pointer + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :])


@triton.jit
def keys(pointer, at_N, columns_P, seen_N, own_P, stride: tl.constexpr):  # type: ignore[no-untyped-def]
    # Transposed, as a product with queries wants them; what is not seen is 0.
    places_PN = at_N[None, :] * stride + columns_P[:, None]
    return tl.load(pointer + places_PN, mask=seen_N[None, :] & own_P[:, None], other=0.0)


@triton.jit
def values(pointer, at_N, columns_P, seen_N, own_P, stride: tl.constexpr):  # type: ignore[no-untyped-def]
    places_NP = at_N[:, None] * stride + columns_P[None, :]
    return tl.load(pointer + places_NP, mask=seen_N[:, None] & own_P[None, :], other=0.0)


@triton.jit
def visible(at_N, seen_N, place_M, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    if CAUSAL:
        return seen_N[None, :] & (at_N[None, :] <= place_M[:, None])
    else:
        return seen_N[None, :]


@triton.jit
def softened(s_MN, hidden_top_M, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    # A query that sees nothing has a top of -inf: its weights are all 0, never NaN.
    safe_M = tl.where(hidden_top_M == -float("inf"), 0.0, hidden_top_M)
    return exp2(s_MN - safe_M[:, None], FAST), safe_M


@triton.jit
def weighed(  # type: ignore[no-untyped-def]
    s_MN, v_NP, top_M, sum_M, context_MP, ALL_SEEN: tl.constexpr, DOT: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    # Some keys' scores into a softmax under way: the weights as v has them, its new top, sum and context.
    # ALL_SEEN: no score is -inf, and so no top.
    new_M = tl.maximum(top_M, tl.max(s_MN, axis=1))
    if ALL_SEEN:
        safe_M = new_M
        p_MN = exp2(s_MN - new_M[:, None], FAST)
    else:
        p_MN, safe_M = softened(s_MN, new_M, FAST)
    shrink_M = exp2(top_M - safe_M, FAST)
    sum_M = sum_M * shrink_M + tl.sum(p_MN, axis=1)
    p_MN = p_MN.to(v_NP.dtype)
    return p_MN, new_M, sum_M, tl.dot(p_MN, v_NP, context_MP * shrink_M[:, None], input_precision=DOT)


@triton.jit
def split(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # What a cast rounds off, as a second number: together they have twice the digits.
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def three_dots(high, low, w_high, w_low, sum):  # type: ignore[no-untyped-def]
    # (high + low) (w_high + w_low) but for low w_low, 2^-22 of the product.
    return tl.dot(high, w_low, tl.dot(low, w_high, tl.dot(high, w_high, sum)))


@triton.jit
def projected(  # type: ignore[no-untyped-def]
    x_MD,
    row_ptr,
    w_ptr,
    v_ptr,
    place_M,
    real_M,
    D: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT_V: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
):
    # q, k and v of norm(x) into their R columns of a row, C columns at a time; under SPLIT_V what rounding left
    # of v behind it.
    gemm = w_ptr.dtype.element_ty
    half = row_ptr.dtype.element_ty
    columns_D = tl.arange(0, D)
    own_MC_ptr = row_ptr + place_M[:, None] * R + tl.arange(0, C)[None, :]
    h_MD = standardised(x_MD, D, EPS).to(gemm)
    for first in tl.range(0, 3 * D, C, num_stages=STAGES):
        part = first // D
        columns_C = tl.multiple_of(first % D, C) + tl.arange(0, C)
        w_DC = tl.load(w_ptr + part * (D * D) + columns_D[:, None] * D + columns_C[None, :])
        p_MC = tl.dot(h_MD, w_DC, input_precision=DOT)
        if part == 0:
            p_MC += tl.load(v_ptr + columns_C)[None, :]
        p_MC, low_MC = split(p_MC, half)
        tl.store(own_MC_ptr + first, p_MC, mask=real_M[:, None])
        if SPLIT_V and part == 2:
            tl.store(own_MC_ptr + D + first, low_MC, mask=real_M[:, None])


@triton.jit
def fed_forward(  # type: ignore[no-untyped-def]
    x_MD,
    w_ptr,
    v_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
    FAST: tl.constexpr,
):
    # x + gelu(norm(x) W1 + b1) W2 + b2, C columns of W1 at a time. Under SPLIT each product is three, over what
    # rounding left of both factors; what is left of W1 and W2 lies behind the layer's other weights.
    gemm = w_ptr.dtype.element_ty
    columns_D = tl.arange(0, D)
    h_MD, h_low_MD = split(standardised(x_MD, D, EPS), gemm)
    for f in tl.range(0, F, C, num_stages=STAGES):
        columns_C = f + tl.arange(0, C)
        w1_DC_ptr = w_ptr + 4 * D * D + columns_D[:, None] * F + columns_C[None, :]
        w2_CD_ptr = w_ptr + 4 * D * D + D * F + columns_C[:, None] * D + columns_D[None, :]
        u_MC = tl.zeros([M, C], tl.float32) + tl.load(v_ptr + 5 * D + columns_C)[None, :]
        if SPLIT:
            u_MC = three_dots(h_MD, h_low_MD, tl.load(w1_DC_ptr), tl.load(w1_DC_ptr + 2 * D * F), u_MC)
            g_MC, g_low_MC = split(gelu(u_MC, FAST), gemm)
            x_MD = three_dots(g_MC, g_low_MC, tl.load(w2_CD_ptr), tl.load(w2_CD_ptr + 2 * D * F), x_MD)
        else:
            u_MC = tl.dot(h_MD, tl.load(w1_DC_ptr), u_MC, input_precision=DOT)
            x_MD = tl.dot(gelu(u_MC, FAST).to(gemm), tl.load(w2_CD_ptr), x_MD, input_precision=DOT)
    return x_MD + tl.load(v_ptr + 4 * D + columns_D)[None, :]
