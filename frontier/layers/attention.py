"""The table of attention kernels: how to call each, and why it would refuse.

Takes    q, k, v as views of `[B, S, H, K]`.
Gives    the context in the same layout, and its log-sum-exp where a kernel can tell; refusals as text.
Knows nothing of projections, slices or lanes.

Letters  B rows, S positions, H heads, K head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from frontier.case import Case
from frontier.layers.refusals import Refuses, is_installed, needs_capability, needs_triton, never
from frontier.machine import Machine
from frontier.recipe import Recipe

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
AttendLse = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""Besides the context the natural log-sum-exp of each query's scores, float32 `[B, H, S]`."""

# Scores of one query in the registers of one program of eight warps: 64 floats a thread.
MOST_SCORES = 16_384


class Kernel(NamedTuple):
    """One way to attend: the call, and the reason for which it cannot serve a case here, or None.

    `attend_lse` is the call for blocks of keys whose contexts are merged; None where the kernel tells no
    log-sum-exp. Queries and keys of unequal numbers all see one another, so no call ever aligns a causal edge.
    """

    attend: Attend
    refuses: Refuses
    attend_lse: AttendLse | None = None


def dense(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """The contract's arithmetic: float32 scores materialised, masked, softmaxed, multiplied."""
    return _dense(q_BSHK, k_BSHK, v_BSHK, causal, lse=False)[0]


def _dense(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool, lse: bool = True) -> tuple[Tensor, Tensor]:
    q_BHSK, k_BHSK, v_BHSK = (t.transpose(1, 2).float() for t in (q_BSHK, k_BSHK, v_BSHK))
    scores_BHSS = q_BHSK @ k_BHSK.transpose(2, 3)
    scores_BHSS.mul_(q_BSHK.shape[-1] ** -0.5)
    if causal:
        hidden_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=scores_BHSS.device).triu_(1)
        scores_BHSS.masked_fill_(hidden_SS, -torch.inf)
    lse_BHS = scores_BHSS.logsumexp(-1) if lse else scores_BHSS.new_empty(0)
    context_BHSK = torch.softmax(scores_BHSS, dim=-1) @ v_BHSK
    return context_BHSK.transpose(1, 2).to(q_BSHK.dtype), lse_BHS


def _aten(name: str, *before: object, after: tuple[object, ...] = ()) -> AttendLse:
    """One of PyTorch's own kernels, below SDPA, which keeps the log-sum-exp to itself.

    The efficient kernel pads it to a multiple of 32 positions, cuDNN's has a last axis of 1.
    """

    def attend_lse(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        q_BHSK, k_BHSK, v_BHSK = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
        call = getattr(torch.ops.aten, name)
        context_BHSK, lse, *_ = call(q_BHSK, k_BHSK, v_BHSK, *before, 0.0, causal, *after)
        B, S, H, _ = q_BSHK.shape
        return context_BHSK.transpose(1, 2), lse.reshape(B, H, -1)[:, :, :S].float()

    return attend_lse


def _flash_lse(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    name = "_scaled_dot_product_flash_attention"
    call = _aten(name, after=(False,)) if q_BSHK.is_cuda else _aten(f"{name}_for_cpu")
    return call(q_BSHK, k_BSHK, v_BSHK, causal)


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
        q_BHSK, k_BHSK, v_BHSK = (t.transpose(1, 2) for t in (q_BSHK, k_BSHK, v_BSHK))
        # One backend only: SDPA raises where that one cannot serve, instead of falling back to another.
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=causal).transpose(1, 2)

    return attend


def fa4(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """FlashAttention 4 (CuTe DSL), called directly: SDPA's own FA4 switch fails on torch 2.11."""
    from flash_attn.cute.interface import flash_attn_func

    # Bottom-right causal alignment, the same as top-left here: queries and keys have one length.
    answer = flash_attn_func(q_BSHK, k_BSHK, v_BSHK, causal=causal)
    context_BSHK: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return context_BSHK


def _fa4_lse(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import flash_attn_func

    context_BSHK, lse_BHS, *_ = flash_attn_func(q_BSHK, k_BSHK, v_BSHK, causal=causal, return_lse=True)
    return context_BSHK, lse_BHS


def short(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """A Triton kernel that reads packed q, k, v in place and writes the context in one piece."""
    from frontier.layers.short_triton import short

    return short(q_BSHK, k_BSHK, v_BSHK, causal)


def scores(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, causal: bool) -> Tensor:
    """Materialised scores between two GEMMs; scale, mask and softmax by one Triton kernel."""
    from frontier.layers.scores_triton import scores

    return scores(q_BSHK, k_BSHK, v_BSHK, causal)


def _cudnn_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    return _fused_refuses(case, recipe, machine, needs=(8, 0), widest=256 if machine.capability == (9, 0) else 128)


def _flash_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if not machine.has_card:
        return None if not recipe.is_half else "half precision attention is slow and untested on the CPU"
    return _fused_refuses(case, recipe, machine, needs=(8, 0), widest=256)


def _efficient_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    return None if machine.has_card else "memory-efficient attention needs a card"


def _fa4_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    reason = _fused_refuses(case, recipe, machine, needs=(9, 0), widest=128)
    if reason is None and not is_installed("flash_attn.cute"):
        return "the package flash-attn-4 is not installed"
    return reason


def _short_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if reason := needs_triton(case, recipe, machine):
        return reason
    if recipe.precision == "fp32":
        return "precision fp32 would multiply without matrix units, needs fp16, bf16 or tf32"
    return f"head width {case.head_width}, needs 256 or less" if case.head_width > 256 else None


def _scores_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    if case.seq_len > MOST_SCORES:
        return f"seq_len {case.seq_len}, one program holds a query's scores for {MOST_SCORES} keys"
    return needs_triton(case, recipe, machine)


def _fused_refuses(case: Case, recipe: Recipe, machine: Machine, *, needs: tuple[int, int], widest: int) -> str | None:
    if machine.capability is None:
        return "it needs a card"
    if reason := needs_capability(machine, needs):
        return reason
    if not recipe.is_half:
        return f"precision {recipe.precision}, needs fp16 or bf16"
    if case.head_width % 8 or case.head_width > widest:
        return f"head width {case.head_width}, needs a multiple of 8 up to {widest}"
    return None


ATTENTION: dict[str, Kernel] = {
    "dense": Kernel(dense, never, _dense),
    "cudnn": Kernel(
        _sdpa(SDPBackend.CUDNN_ATTENTION),
        _cudnn_refuses,
        _aten("_scaled_dot_product_cudnn_attention", None, True, after=(False,)),
    ),
    "flash": Kernel(_sdpa(SDPBackend.FLASH_ATTENTION), _flash_refuses, _flash_lse),
    "efficient": Kernel(
        _sdpa(SDPBackend.EFFICIENT_ATTENTION),
        _efficient_refuses,
        _aten("_scaled_dot_product_efficient_attention", None, True),
    ),
    "fa4": Kernel(fa4, _fa4_refuses, _fa4_lse),
    "short": Kernel(short, _short_refuses),
    "scores": Kernel(scores, _scores_refuses),
}
