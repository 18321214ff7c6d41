"""Attention over short sequences as one Triton kernel: scores never leave the multiprocessor.

Takes    q, k, v as views of one packed buffer, read in place.
Gives    the context, `[B, S, H, K]` in one piece.
Knows nothing of projections or layers.

Letters  B rows, S positions, H heads, K head width; M queries and N keys of a tile, P head width padded to a power
         of two, 16 at least: the matrix units take no less, and zeros add nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from frontier.layers.cards import capability_of

LOG2_E = 1.4426950408889634


@triton.jit
def _sweep(
    sums_MP, weight_M, top_M, q_MP, k_ptr, v_ptr, query_M, begin, end, S, stride_S, scale,
    K: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [begin, end), float32; EDGE: some of them may be hidden or past the end."""
    real_P = tl.arange(0, P) < K
    k_ptr += begin.to(tl.int64) * stride_S
    v_ptr += begin.to(tl.int64) * stride_S
    for start in range(begin, end, N):
        key_N = start + tl.arange(0, N)
        real_NP = (key_N < S)[:, None] & real_P[None, :] if EDGE else (key_N >= 0)[:, None] & real_P[None, :]
        place_NP = tl.arange(0, N)[:, None] * stride_S + tl.arange(0, P)[None, :]
        k_NP = tl.load(k_ptr + place_NP, mask=real_NP, other=0.0)
        scores_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision=PRECISION) * scale
        if EDGE:
            visible_MN = (key_N < S)[None, :]
            if CAUSAL:
                visible_MN = visible_MN & (key_N[None, :] <= query_M[:, None])
            scores_MN = tl.where(visible_MN, scores_MN, -float("inf"))
        # Finite from the first tile on: every query sees key 0, under causal too.
        new_M = tl.maximum(top_M, tl.max(scores_MN, axis=1))
        shrink_M = tl.exp2(top_M - new_M)
        parts_MN = tl.exp2(scores_MN - new_M[:, None])
        weight_M = weight_M * shrink_M + tl.sum(parts_MN, axis=1)
        v_NP = tl.load(v_ptr + place_NP, mask=real_NP, other=0.0)
        sums_MP = tl.dot(parts_MN.to(v_NP.dtype), v_NP, sums_MP * shrink_M[:, None], input_precision=PRECISION)
        top_M = new_M
        k_ptr += N * stride_S
        v_ptr += N * stride_S
    return sums_MP, weight_M, top_M


@triton.jit
def short_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_B, stride_S, stride_H, S, H, scale,
    K: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, M)
    head = tl.program_id(0) // tiles
    # Late queries see most keys: they start first. int64: a batch passes 2^31 elements of q, k and v.
    first = (tiles - 1 - tl.program_id(0) % tiles) * M
    row = (head // H).to(tl.int64)
    base = row * stride_B + (head % H).to(tl.int64) * stride_H
    query_M = first + tl.arange(0, M)
    real_MP = (query_M < S)[:, None] & (tl.arange(0, P) < K)[None, :]
    place_MP = tl.arange(0, M)[:, None] * stride_S + tl.arange(0, P)[None, :]
    q_MP = tl.load(q_ptr + base + first.to(tl.int64) * stride_S + place_MP, mask=real_MP, other=0.0)
    sums_MP = tl.zeros([M, P], tl.float32)
    weight_M = tl.zeros([M], tl.float32)
    top_M = tl.full([M], -float("inf"), tl.float32)
    # Whole tiles of keys that every query here sees, then the rest with its mask.
    if CAUSAL:
        whole, end = first // N * N, tl.minimum(first + M, S)
    else:
        whole, end = S // N * N, S
    k_ptr += base
    v_ptr += base
    sums_MP, weight_M, top_M = _sweep(
        sums_MP, weight_M, top_M, q_MP, k_ptr, v_ptr, query_M, whole * 0, whole, S, stride_S, scale,
        K, P, N, CAUSAL, False, PRECISION,
    )  # fmt: skip
    sums_MP, weight_M, top_M = _sweep(
        sums_MP, weight_M, top_M, q_MP, k_ptr, v_ptr, query_M, whole, end, S, stride_S, scale,
        K, P, N, CAUSAL, True, PRECISION,
    )  # fmt: skip
    out_ptr += (row * S + first) * (H * K) + (head % H) * K
    place_MP = tl.arange(0, M)[:, None] * (H * K) + tl.arange(0, P)[None, :]
    tl.store(out_ptr + place_MP, (sums_MP / weight_M[:, None]).to(out_ptr.dtype.element_ty), mask=real_MP)


def tile(head_width: int, positions: int, item_bytes: int, capability: tuple[int, int]) -> dict[str, Any]:
    """The kernel's sizes. Queries, and two stages of keys and values, lie in shared memory: 96 KiB at the most
    (99 is what an 8.6, 8.9 or 12.0 has). On a 7.5 Triton multiplies without matrix units: small tiles, unrolled."""
    padded = max(16, triton.next_power_of_2(head_width))
    row_bytes = padded * item_bytes
    sizes = {"P": padded, "M": 64, "N": 64, "num_warps": 4, "num_stages": 2}
    if row_bytes >= 512:
        # A head of 256 in half precision: 64 x 256 sums are 128 registers of each thread of four warps.
        sizes |= {"N": 32, "num_warps": 8}
    if row_bytes >= 1024:
        sizes |= {"M": 32, "N": 16}
    if capability < (8, 0):
        sizes |= {"M": 32, "N": 16 if row_bytes >= 256 else 32, "num_warps": 4}
    elif row_bytes <= 128 and positions >= 512:
        sizes |= {"M": 128}  # half as many reads of each key
    return sizes


def short(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """Attention read in place; float32 operands by TF32 where it is allowed, else exactly."""
    B, S, H, K = q_BSHK.shape
    assert q_BSHK.stride() == k_BSHK.stride() == v_BSHK.stride() and q_BSHK.stride(3) == 1, q_BSHK.stride()
    out_BSHK = torch.empty(B, S, H, K, dtype=q_BSHK.dtype, device=q_BSHK.device)
    sizes = tile(K, S, q_BSHK.element_size(), capability_of(q_BSHK.device))
    precise = q_BSHK.element_size() < 4 or not torch.backends.cuda.matmul.allow_tf32
    short_kernel[(B * H * triton.cdiv(S, sizes["M"]),)](
        q_BSHK, k_BSHK, v_BSHK, out_BSHK, *q_BSHK.stride()[:3], S, H, K**-0.5 * LOG2_E,
        K=K, CAUSAL=causal, PRECISION="ieee" if precise else "tf32", **sizes,
    )  # fmt: skip
    return out_BSHK
