"""gelu(h W^T + b) as one Triton GEMM with its epilogue on float32 accumulators.

Takes    half-precision tokens, a weight `[out, in]`, a bias, a buffer.
Gives    the buffer written, rounded once.
Knows nothing of layers.

Letters  T tokens, D width, F feed-forward width; M x N one program's tile of the output, C a piece of D.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from frontier.layers.cards import capability_of


@triton.jit
def gelu_linear_kernel(
    h_ptr, w_ptr, bias_ptr, out_ptr, T, F, h_stride,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs go down GROUP row tiles before they step sideways: their weights and tokens stay in L2.
    tiles_down = tl.cdiv(T, M)
    in_group = GROUP * tl.cdiv(F, N)
    first = tl.program_id(0) // in_group * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    down = first + tl.program_id(0) % in_group % height
    across = tl.program_id(0) % in_group // height
    # int64 where a tile begins; inside it, M x D stays small.
    h_ptr += (down * M).to(tl.int64) * h_stride
    w_ptr += (across * N).to(tl.int64) * D
    real_M = tl.arange(0, M) < T - down * M
    real_N = tl.arange(0, N) < F - across * N
    sums_MN = tl.zeros([M, N], tl.float32)
    for start in range(0, D, C):
        place_C = start + tl.arange(0, C)
        real_C = place_C < D
        h_MC = tl.load(
            h_ptr + tl.arange(0, M)[:, None] * h_stride + place_C[None, :],
            mask=real_M[:, None] & real_C[None, :], other=0.0,
        )  # fmt: skip
        w_CN = tl.load(
            w_ptr + tl.arange(0, N)[None, :] * D + place_C[:, None],
            mask=real_N[None, :] & real_C[:, None], other=0.0,
        )  # fmt: skip
        sums_MN = tl.dot(h_MC, w_CN, sums_MN, input_precision="ieee")
    column_N = across * N + tl.arange(0, N)
    u_MN = sums_MN + tl.load(bias_ptr + column_N, mask=real_N, other=0.0).to(tl.float32)[None, :]
    u_MN = 0.5 * u_MN * (1.0 + tl.erf(u_MN * 0.7071067811865476))
    out_ptr += (down * M).to(tl.int64) * F + column_N[None, :]
    place_MN = tl.arange(0, M)[:, None] * F
    tl.store(out_ptr + place_MN, u_MN.to(out_ptr.dtype.element_ty), mask=real_M[:, None] & real_N[None, :])


def tile(tokens: int, ffn_dim: int, width: int, capability: tuple[int, int]) -> dict[str, Any]:
    """The kernel's sizes: large tiles where they still fill a card twice, small ones below.

    128 x 128 reads each operand a quarter as often as 64 x 64 and wants 96 KiB of shared memory for three stages of
    64 columns, within every card from 8.0 on; a 7.5 has 64 KiB and no asynchronous copies.
    """
    narrow = {"C": min(64, max(16, triton.next_power_of_2(width))), "GROUP": 8}
    if capability < (8, 0):
        return {"M": 64, "N": 64, **narrow, "num_warps": 4, "num_stages": 2}
    if triton.cdiv(tokens, 128) * triton.cdiv(ffn_dim, 128) >= 256 and ffn_dim >= 128:
        return {"M": 128, "N": 128, **narrow, "num_warps": 8, "num_stages": 3}
    return {"M": 64, "N": 64 if ffn_dim > 32 else 32, **narrow, "num_warps": 4, "num_stages": 3}


def gelu_linear(h_TD: Tensor, weight_FD: Tensor, bias_F: Tensor, out_TF: Tensor) -> None:
    (T, D), F = h_TD.shape, len(weight_FD)
    assert h_TD.stride(1) == 1 and weight_FD.is_contiguous() and out_TF.is_contiguous(), h_TD.stride()
    sizes = tile(T, F, D, capability_of(h_TD.device))
    grid = (triton.cdiv(T, sizes["M"]) * triton.cdiv(F, sizes["N"]),)
    gelu_linear_kernel[grid](h_TD, weight_FD, bias_F, out_TF, T, F, h_TD.stride(0), D=D, **sizes)
