"""The stack by two kernels a layer: attention by name, and one that does all between two attentions.

Takes    float32 weights, a case, a recipe; then rows.
Gives    the stack in place on the float32 residual stream; refusals as text.
Knows nothing of masks, launches or why another recipe may be faster.

Letters  B rows, S positions, D width, N tokens (B x S), M tokens of a tile, C columns at a time, H heads, K head width.
"""

from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.cards import capability_of
from frontier.layers.costs import NORM_EPS
from frontier.layers.refusals import needs_capability, needs_triton
from frontier.layers.stack import pack_weights
from frontier.layers.stack_cut import size_refusal
from frontier.layers.weights import State, working_dtype
from frontier.machine import Machine
from frontier.recipe import Recipe


def refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    """Why this kernel cannot lie between a case's attentions, or None."""
    if not recipe.is_half:
        return f"precision {recipe.precision}, the kernel between attentions multiplies in fp16 or bf16"
    if recipe.held_at_once in ("held-projections", "held-output", "held-all"):
        return f"{recipe.held}: the kernel between attentions holds the feed-forward GEMMs (held-ffn) or none"
    if recipe.projection != "packed":
        return f"projection {recipe.projection}, the kernel between attentions makes q, k and v packed"
    if recipe.launch.startswith("compile"):
        return f"{recipe.launch} cannot trace the Triton kernel between attentions"
    if reason := size_refusal(case, "the kernel between attentions"):
        return reason
    if case.d_model > 64 and (reason := needs_capability(machine, (8, 0))):
        return f"d_model {case.d_model}: {reason}"
    return needs_triton(case, recipe, machine)


def tile(ffn_dim: int, capability: tuple[int, int], splits: bool = False) -> dict[str, int]:
    """Tokens and columns of a tile, warps and stages. The stack kernel's own where it was measured (an H200)."""
    stages = 3 if capability == (9, 0) else 1
    return {"M": 64, "C": min(ffn_dim, 32 if splits else 64), "STAGES": stages, "num_warps": 4, "num_stages": stages}


class TailStack:
    """All layers in place: the attention of a recipe, and one kernel between each two. Weights packed once."""

    def __init__(self, state: State, case: Case, recipe: Recipe, device: torch.device) -> None:
        self._case, self._recipe = case, recipe
        splits = recipe.held_at_once == "held-ffn"
        self.weights, self.vectors = pack_weights(
            state, case, working_dtype(recipe), device, folds_scale=False, splits_ffn=splits
        )
        self._sizes: dict[str, Any] = {"L": case.layers, "D": case.d_model, "F": case.ffn_dim, "EPS": NORM_EPS}
        self._sizes |= {"FAST": device.type == "cuda", "SPLIT": splits}
        self._sizes |= tile(case.ffn_dim, capability_of(device), splits)

    def __call__(self, x_BSD: Tensor) -> None:
        """The whole stack on float32 rows, in place."""
        B, S, D = x_BSD.shape
        case, x_ND = self._case, x_BSD.view(B * S, D)
        qkv_N3D = torch.empty(B * S, 3 * D, dtype=self.weights.dtype, device=x_BSD.device)
        q_BSHK, k_BSHK, v_BSHK = qkv_N3D.view(B, S, 3, case.heads, case.head_width).unbind(2)
        self._launch(x_ND, qkv_N3D, qkv_N3D, 0, "first")
        for layer in range(case.layers):
            context_BSHK = ATTENTION[self._recipe.attention].attend(q_BSHK, k_BSHK, v_BSHK, case.causal)
            place = "middle" if layer + 1 < case.layers else "last"
            self._launch(x_ND, context_BSHK.reshape(B * S, D), qkv_N3D, layer, place)

    def _launch(self, x_ND: Tensor, context_ND: Tensor, qkv_N3D: Tensor, layer: int, place: str) -> None:
        from frontier.layers.tail_triton import tail_kernel

        grid = (-(-len(x_ND) // self._sizes["M"]),)
        tensors = (x_ND, context_ND, x_ND, qkv_N3D, self.weights, self.vectors)
        tail_kernel[grid](*tensors, len(x_ND), layer, PLACE=place, **self._sizes)
