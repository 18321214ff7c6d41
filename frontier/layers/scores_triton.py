"""Attention over materialised scores: two library GEMMs around one Triton kernel of scale, mask and softmax.

Takes    q, k, v as views of `[B, S, H, K]`.
Gives    the context in the same layout.
Knows nothing of projections or layers.

Letters  B rows, S positions, H heads, K head width, R queries of one program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_kernel(scores_ptr, rows, S, scale, WIDE: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr):
    # int64: rows x S passes 2^31 elements for 64 x 16 heads at S = 1,449.
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    key_S = tl.arange(0, WIDE)
    real_RS = (row_R < rows)[:, None] & (key_S < S)[None, :]
    visible_RS = real_RS & (key_S[None, :] <= (row_R % S)[:, None]) if CAUSAL else real_RS
    place_RS = row_R[:, None] * S + key_S[None, :]
    scores_RS = tl.load(scores_ptr + place_RS, mask=visible_RS, other=-float("inf")).to(tl.float32) * scale
    # Rows past the end have no score at all: 0 for their maximum keeps NaN out.
    top_R = tl.max(scores_RS, axis=1)
    top_R = tl.where(row_R < rows, top_R, 0.0)
    parts_RS = tl.exp2(scores_RS - top_R[:, None])
    sum_R = tl.sum(parts_RS, axis=1)
    parts_RS = parts_RS / tl.where(row_R < rows, sum_R, 1.0)[:, None]
    tl.store(scores_ptr + place_RS, parts_RS.to(scores_ptr.dtype.element_ty), mask=real_RS)


def tile(positions: int) -> dict[str, Any]:
    """The kernel's sizes: 1,024 scores a program of four warps, or one query and eight warps from 2,048 on."""
    wide = max(16, triton.next_power_of_2(positions))
    return {"WIDE": wide, "R": max(1, 1024 // wide), "num_warps": 8 if wide >= 2048 else 4}


def scores(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """Scores in the operands' precision, their softmax over them in place, the context."""
    B, S, H, K = q_BSHK.shape
    q_GSK, k_GSK, v_GSK = (t.transpose(1, 2).reshape(B * H, S, K) for t in (q_BSHK, k_BSHK, v_BSHK))
    # K^-1/2 goes in on the GEMM's float32 sums: a half-precision score of large q and k would overflow without it.
    scores_GSS = torch.empty(B * H, S, S, dtype=q_GSK.dtype, device=q_GSK.device)
    scores_GSS.baddbmm_(q_GSK, k_GSK.transpose(1, 2), beta=0, alpha=K**-0.5)
    sizes = tile(S)
    softmax_kernel[(triton.cdiv(B * H * S, sizes["R"]),)](
        scores_GSS, B * H * S, S, 1.4426950408889634, CAUSAL=causal, **sizes
    )
    return torch.bmm(scores_GSS, v_GSK).view(B, H, S, K).transpose(1, 2)
