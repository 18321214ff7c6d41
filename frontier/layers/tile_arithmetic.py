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
def softened(s_MN, hidden_top_M, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    # A query that sees nothing has a top of -inf: its weights are all 0, never NaN.
    safe_M = tl.where(hidden_top_M == -float("inf"), 0.0, hidden_top_M)
    return exp2(s_MN - safe_M[:, None], FAST), safe_M
