"""Residual addition, LayerNorm and cast as one Triton kernel.

Takes    float32 tokens, what is added to them, a norm's weights, a buffer for the normed tokens.
Gives    both written: the residual in place, the normed tokens in the buffer's precision.
Knows nothing of what is added or who reads it.

Letters  T tokens, D width, R tokens of one program.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def join_kernel(
    x_ptr, added_ptr, gain_ptr, bias_ptr, h_ptr, T, x_stride, added_stride, h_stride,
    D: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    ADDS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    # int64: T x D passes 2^31 elements for 2,097,152 tokens of width 1,024.
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_D = tl.arange(0, WIDE)
    real_RD = (row_R < T)[:, None] & (column_D < D)[None, :]
    x_RD = tl.load(x_ptr + row_R[:, None] * x_stride + column_D[None, :], mask=real_RD, other=0.0)
    if ADDS:
        added_RD = tl.load(added_ptr + row_R[:, None] * added_stride + column_D[None, :], mask=real_RD, other=0.0)
        x_RD += added_RD.to(tl.float32)
    if KEEPS:
        tl.store(x_ptr + row_R[:, None] * x_stride + column_D[None, :], x_RD, mask=real_RD)
    # The mean first, then the squares about it: one pass over sums of squares cancels for tokens far from 0.
    mean_R = tl.sum(x_RD, axis=1) / D
    centred_RD = tl.where(real_RD, x_RD - mean_R[:, None], 0.0)
    variance_R = tl.sum(centred_RD * centred_RD, axis=1) / D
    inverse_R = 1.0 / tl.sqrt(variance_R + EPS)
    gain_D = tl.load(gain_ptr + column_D, mask=column_D < D, other=0.0)
    bias_D = tl.load(bias_ptr + column_D, mask=column_D < D, other=0.0)
    h_RD = centred_RD * inverse_R[:, None] * gain_D[None, :] + bias_D[None, :]
    tl.store(h_ptr + row_R[:, None] * h_stride + column_D[None, :], h_RD.to(h_ptr.dtype.element_ty), mask=real_RD)


def tile(width: int) -> dict[str, Any]:
    """The kernel's sizes for a width: 1,024 floats a program of four warps, so that 128 tokens of width 128 fill
    16 multiprocessors; eight warps from 4,096 on, where a program is one token."""
    wide = triton.next_power_of_2(width)
    return {"WIDE": wide, "R": max(1, 1024 // wide), "num_warps": 8 if wide >= 4096 else 4}


def join(x_TD: Tensor, added_TD: Tensor | None, gain_D: Tensor, bias_D: Tensor, h_TD: Tensor, eps: float) -> None:
    """Write `x + added` to `x_TD`, unless `h_TD` is the same memory, and its LayerNorm to `h_TD`."""
    T, D = x_TD.shape
    assert x_TD.stride(1) == h_TD.stride(1) == 1, (x_TD.stride(), h_TD.stride())
    adds = added_TD is not None
    added_TD = added_TD if added_TD is not None else x_TD
    assert added_TD.stride(1) == 1, added_TD.stride()
    sizes = tile(D)
    join_kernel[(triton.cdiv(T, sizes["R"]),)](
        x_TD, added_TD, gain_D, bias_D, h_TD, T, x_TD.stride(0), added_TD.stride(0), h_TD.stride(0),
        D=D, EPS=eps, ADDS=adds, KEEPS=adds and h_TD.data_ptr() != x_TD.data_ptr(), **sizes,
    )  # fmt: skip
