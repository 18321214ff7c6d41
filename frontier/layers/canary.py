"""A start-up check of an attention kernel on the user's own card, versions and length.

Takes    a kernel's name, a case, a device, perhaps the length of a chunk.
Gives    the reason for which the kernel must not be used, or None.
Knows nothing of evidence or speed.

Letters  B rows, S positions, H heads, K head width, R checked rows.
"""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.block import matmul_precision
from frontier.layers.cards import on_device
from frontier.layers.costs import chunk_refusal, most_keys_per_call
from frontier.layers.program import refusal
from frontier.layers.weights import working_dtype
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.recipe import Recipe

# Of a checked row's length, between float64 and the kernel. Rounding leaves 3e-4 (fp16), 3e-3 (bf16), 1e-6
# (float32) and 6e-4 (TF32); one dropped block of 64 keys among 100,000 leaves 2.5e-2. Of a log-sum-exp the same as it
# is: it comes from float32 sums, and in base 2 it would be off by 0.44 of itself.
TOLERANCE = {"fp16": 4e-3, "bf16": 1e-2, "fp32": 1e-4, "tf32": 4e-3}
CANARY_HEADS = 2
# A CPU would take half a minute for 100,000 positions; its kernels' offsets are 64-bit.
CPU_MOST_POSITIONS = 8_192


def why_not(case: Case, recipe: Recipe, machine: Machine, chunk: int | None = None) -> str | None:
    """Why `recipe` must not serve this case here, or None: first its rules, then its attention's numbers.

    `chunk`   positions of a chunk, if rows are to be cut into such.
    """
    cut_refusal = None if chunk is None else chunk_refusal(recipe)
    return cut_refusal or refusal(case, recipe, machine) or canary(case, recipe, machine, chunk)


def canary(case: Case, recipe: Recipe, machine: Machine, chunk: int | None = None) -> str | None:
    """Run the kernel at the case's own length, two heads, and check rows of it in float64.

    With a `chunk` it runs at that length, as the flow calls it: once as the case says, once with all keys visible, as
    many as one call may ever meet; and its log-sum-exp is checked too, which must be the natural logarithm.

    The rows lie where kernels of others went wrong: the ends, tile edges, and around 2^32 / S, where 32-bit
    offsets into an S x S matrix overflow (pytorch#162588).
    """
    if recipe.attention == "dense":
        return None  # it is the arithmetic that others are checked by
    S, N = positions_tried(case, machine, chunk), keys_tried(case, recipe, machine, chunk)
    H, K = min(case.heads, CANARY_HEADS), case.head_width
    dtype = working_dtype(recipe)
    generator = torch.Generator(machine.device).manual_seed(7)
    try:
        with (
            warnings.catch_warnings(record=True) as told,
            on_device(torch.device(machine.device)),
            matmul_precision(recipe),
        ):
            warnings.simplefilter("always")
            # cuBLAS's workspace first: carved out of what is freed here, it would keep all of that from the run.
            _ = torch.ones(8, 8, device=machine.device) @ torch.ones(8, 8, device=machine.device)
            packed_BN3HK = torch.randn(1, N, 3, H, K, device=machine.device, generator=generator).to(dtype)
            q_BSHK = packed_BN3HK[:, :S, 0]
            kernel, limit = ATTENTION[recipe.attention], TOLERANCE[recipe.precision]
            for causal in sorted({case.causal} if chunk is None else {case.causal, False}, reverse=True):
                lse_BHS, seen = None, S if causal else N
                k_BSHK, v_BSHK = packed_BN3HK[:, :seen, 1], packed_BN3HK[:, :seen, 2]
                if chunk is None:
                    context_BSHK = kernel.attend(q_BSHK, k_BSHK, v_BSHK, causal)
                else:
                    assert kernel.attend_lse is not None
                    context_BSHK, lse_BHS = kernel.attend_lse(q_BSHK, k_BSHK, v_BSHK, causal)
                errors = list(_errors(q_BSHK, k_BSHK, v_BSHK, context_BSHK, lse_BHS, checked_rows(S), causal))
                if not all(error <= limit for error, _ in errors):  # a NaN is no error that is small
                    return f"wrong numbers at S = {S}: relative error {_worst(errors, 0):.2g}, limit {limit:.2g}"
                if not all(error <= limit for _, error in errors):
                    return f"wrong log-sum-exp at S = {S}: off by {_worst(errors, 1):.2g}, limit {limit:.2g} in base e"
    except Exception as reason:  # a third party's kernel may fail in any way; the reason is kept and shown
        lines = [*str(reason).strip().splitlines(), *(str(w.message).split(" (Triggered")[0] for w in told)]
        return f"it failed: {'; '.join(lines[:3])[:300]}"
    return None


def positions_tried(case: Case, machine: Machine, chunk: int | None = None) -> int:
    """The length at which the canary runs: on a card the case's own, or that of a chunk."""
    length = min(case.seq_len, chunk or case.seq_len)
    return length if machine.has_card else min(length, CPU_MOST_POSITIONS)


def keys_tried(case: Case, recipe: Recipe, machine: Machine, chunk: int | None = None) -> int:
    """The keys of the longest call: of chunks whose keys wait on the card all that one call may hold. Fewer on a card
    on which they, and a float64 copy of them, would take more than half of what is free: there none wait."""
    S = positions_tried(case, machine, chunk)
    if chunk is None:
        return S
    longest = min(case.seq_len, most_keys_per_call(case, recipe))
    if not machine.has_card:
        return max(S, min(longest, CPU_MOST_POSITIONS))
    elements = longest * 2 * min(case.heads, CANARY_HEADS) * case.head_width
    return longest if 10 * elements <= (machine.device_budget_bytes - CONTEXT_BYTES) // 2 else S


def checked_rows(S: int) -> list[int]:
    """Some twenty positions below S: the ends, powers of two, around 2^32 / S."""
    edge = (1 << 32) // S
    wanted = {0, 1, 63, 64, 127, 128, S // 2, S - 2, S - 1, edge - 1, edge, edge + 1, edge + 64}
    wanted |= {1 << power for power in range(10, 24, 2)}
    return sorted(row for row in wanted if 0 <= row < S)


def _errors(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    context_BSHK: Tensor,
    lse_BHS: Tensor | None,
    rows_R: list[int],
    causal: bool,
) -> Iterator[tuple[float, float]]:
    """Of each checked row, its context's relative error and its log-sum-exp's absolute one."""
    for row in rows_R:
        keys = row + 1 if causal else k_BSHK.shape[1]
        q_HK, got_HK = q_BSHK[0, row].double(), context_BSHK[0, row].double()
        scores_HS = torch.einsum("hk,shk->hs", q_HK, k_BSHK[0, :keys].double()) * q_HK.shape[-1] ** -0.5
        want_HK = torch.einsum("hs,shk->hk", scores_HS.softmax(-1), v_BSHK[0, :keys].double())
        lse_error = 0.0
        if lse_BHS is not None:
            lse_error = float((lse_BHS[0, :, row].double() - scores_HS.logsumexp(-1)).abs().max())
        yield float((got_HK - want_HK).norm() / want_HK.norm()), lse_error


def _worst(errors: list[tuple[float, float]], kind: int) -> float:
    """The largest; a NaN is larger than all others."""
    return max((pair[kind] for pair in errors), key=lambda error: (error != error, error))
