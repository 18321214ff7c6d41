"""A start-up check of an attention kernel on the user's own card, versions and length.

Takes    a kernel's name, a case, a device.
Gives    the reason for which the kernel must not be used, or None.
Knows nothing of evidence or speed.

Letters  B rows, S positions, H heads, K head width, R checked rows.
"""

import warnings

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.block import matmul_precision
from frontier.layers.cards import on_device
from frontier.layers.program import refusal
from frontier.layers.weights import working_dtype
from frontier.machine import Machine
from frontier.recipe import Recipe

# Of a checked row's length, between float64 and the kernel. Rounding leaves 3e-4 (fp16), 3e-3 (bf16), 1e-6
# (float32) and 6e-4 (TF32); one dropped block of 64 keys among 100,000 leaves 2.5e-2.
TOLERANCE = {"fp16": 4e-3, "bf16": 1e-2, "fp32": 1e-4, "tf32": 4e-3}
CANARY_HEADS = 2
# A CPU would take half a minute for 100,000 positions; its kernels' offsets are 64-bit.
CPU_MOST_POSITIONS = 8_192


def why_not(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Why `recipe` must not serve this case here, or None: first its rules, then its attention's numbers."""
    return refusal(case, recipe, machine) or canary(case, recipe, machine)


def canary(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Run the kernel at the case's own length, two heads, and check rows of it in float64.

    The rows lie where kernels of others went wrong: the ends, tile edges, and around 2^32 / S, where 32-bit
    offsets into an S x S matrix overflow (pytorch#162588).
    """
    if recipe.attention == "dense":
        return None  # it is the arithmetic that others are checked by
    S = positions_tried(case, machine)
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
            packed_BS3HK = torch.randn(1, S, 3, H, K, device=machine.device, generator=generator).to(dtype)
            q_BSHK, k_BSHK, v_BSHK = packed_BS3HK.unbind(2)
            context_BSHK = ATTENTION[recipe.attention].attend(q_BSHK, k_BSHK, v_BSHK, case.causal)
            rows_R = checked_rows(S)
            error = _worst_relative_error(q_BSHK, k_BSHK, v_BSHK, context_BSHK, rows_R, case.causal)
    except Exception as reason:  # a third party's kernel may fail in any way; the reason is kept and shown
        lines = [*str(reason).strip().splitlines(), *(str(w.message).split(" (Triggered")[0] for w in told)]
        return f"it failed: {'; '.join(lines[:3])[:300]}"
    if not error <= TOLERANCE[recipe.precision]:
        return f"wrong numbers at S = {S}: relative error {error:.2g}, limit {TOLERANCE[recipe.precision]:.2g}"
    return None


def positions_tried(case: Case, machine: Machine) -> int:
    """The length at which the canary runs: the case's own on a card."""
    return case.seq_len if machine.has_card else min(case.seq_len, CPU_MOST_POSITIONS)


def checked_rows(S: int) -> list[int]:
    """Some twenty positions below S: the ends, powers of two, around 2^32 / S."""
    edge = (1 << 32) // S
    wanted = {0, 1, 63, 64, 127, 128, S // 2, S - 2, S - 1, edge - 1, edge, edge + 1, edge + 64}
    wanted |= {1 << power for power in range(10, 24, 2)}
    return sorted(row for row in wanted if 0 <= row < S)


def _worst_relative_error(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, context_BSHK: Tensor, rows_R: list[int], causal: bool
) -> float:
    worst = 0.0
    for row in rows_R:
        keys = row + 1 if causal else k_BSHK.shape[1]
        q_HK, got_HK = q_BSHK[0, row].double(), context_BSHK[0, row].double()
        scores_HS = torch.einsum("hk,shk->hs", q_HK, k_BSHK[0, :keys].double()) * q_HK.shape[-1] ** -0.5
        want_HK = torch.einsum("hs,shk->hk", scores_HS.softmax(-1), v_BSHK[0, :keys].double())
        error = float((got_HK - want_HK).norm() / want_HK.norm())
        if not error <= worst:  # a NaN too
            worst = error
        if worst != worst:
            return worst  # a NaN must not be forgotten at the next row
    return worst
