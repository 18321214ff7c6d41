"""The contract's stack as the contract writes it, dense and masked; and as anyone writes it for speed, compiled.

Takes    rows and a float32 or float64 state on one device, a mask.
Gives    the output that others are judged by; the yardstick that their times are held against.
Knows nothing of recipes or kernels: neither shares a line with the layers that it judges, nor with the other.

Letters  B rows, S positions, D width, H heads, K head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from frontier.case import Case
from frontier.spans import cut
from frontier.units import MIB

# Scores and their softmax of one slice: 4,096 rows of case 6 and all of case 13's 64 on a card.
MOST_SCORES_BYTES = {"cuda": 2048 * MIB, "cpu": 64 * MIB}


def reference(x_BSD: Tensor, state: dict[str, Tensor], case: Case, valid_BS: Tensor | None = None) -> Tensor:
    """The whole stack on `x_BSD`, slice by slice of its rows; in the state's precision, on its device.

    Masks    `valid_BS` is bool on any device: invalid keys get -inf, invalid tokens are 0 after each part.
    TF32     is the caller's switch to set.
    """
    out_BSD = torch.empty_like(x_BSD, dtype=next(iter(state.values())).dtype)
    for rows in cut(len(x_BSD), slice_rows(case, x_BSD.device)):
        part = rows.as_slice()
        valid = None if valid_BS is None else valid_BS[part].to(x_BSD.device)
        out_BSD[part] = _stack(x_BSD[part].to(out_BSD.dtype), state, case, valid)
    return out_BSD


def slice_rows(case: Case, device: torch.device) -> int:
    """Rows whose scores, with their softmax, stay within the device's bound; at least one."""
    return max(
        1, min(case.batch_size, MOST_SCORES_BYTES[device.type] * case.batch_size // case.dense_scores_bytes // 2)
    )


def _stack(x_BSD: Tensor, state: dict[str, Tensor], case: Case, valid_BS: Tensor | None) -> Tensor:
    B, S, D = x_BSD.shape
    hidden = torch.zeros(1, 1, S, S, dtype=torch.bool, device=x_BSD.device)
    if case.causal:
        hidden = torch.ones_like(hidden).triu_(1)
    if valid_BS is not None:
        hidden = hidden | ~valid_BS[:, None, None, :]

    def norm(h_BSD: Tensor, name: str) -> Tensor:
        return layer_norm(h_BSD, (D,), state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-5)

    def affine(h_BSI: Tensor, name: str) -> Tensor:
        return linear(h_BSI, state[f"{name}.weight"], state[f"{name}.bias"])

    def only_valid(h_BSD: Tensor) -> Tensor:
        # A token that sees no key has NaN after softmax; such a token is invalid or alone with invalid keys.
        return h_BSD if valid_BS is None else h_BSD.masked_fill(~valid_BS[..., None], 0)

    for i in range(case.layers):
        name = f"layers.{i}"
        h_BSD = norm(x_BSD, f"{name}.norm1")
        q_BHSK, k_BHSK, v_BHSK = (
            affine(h_BSD, f"{name}.attention.{part}_proj").view(B, S, case.heads, case.head_width).transpose(1, 2)
            for part in "qkv"
        )
        scores_BHSS = (q_BHSK @ k_BHSK.transpose(2, 3) * case.head_width**-0.5).masked_fill_(hidden, -torch.inf)
        context_BSD = (torch.softmax(scores_BHSS, dim=-1) @ v_BHSK).transpose(1, 2).reshape(B, S, D)
        x_BSD = x_BSD + only_valid(affine(context_BSD, f"{name}.attention.out_proj"))
        hidden_BSF = gelu(affine(norm(x_BSD, f"{name}.norm2"), f"{name}.ffn_in"))
        x_BSD = only_valid(x_BSD + affine(hidden_BSF, f"{name}.ffn_out"))
    return only_valid(norm(x_BSD, "final_norm"))


def yardstick(
    state: dict[str, Tensor], case: Case, device: torch.device, dtype: torch.dtype = torch.float16
) -> Callable[[Tensor], Tensor]:
    """Plain layers, compiled: GEMMs and attention in `dtype`, the rest in float32. Outputs last until the next call."""

    def placed(*names: str) -> list[Tensor]:
        kept = torch.float32 if "norm" in names[0] else dtype
        pair = [torch.cat([state[f"{n}.{kind}"] for n in names]).to(device, kept) for kind in ("weight", "bias")]
        for tensor in pair:
            torch._dynamo.mark_static_address(tensor)  # else a CUDA graph copies every weight at every call
        return pair

    packed = [f"attention.{part}_proj" for part in "qkv"]
    parts = (["norm1"], packed, ["attention.out_proj"], ["norm2"], ["ffn_in"], ["ffn_out"])
    layers = [[placed(*(f"layers.{i}.{name}" for name in names)) for names in parts] for i in range(case.layers)]
    last = placed("final_norm")

    def norm(h_BSD: Tensor, pair: list[Tensor]) -> Tensor:
        return layer_norm(h_BSD, (case.d_model,), pair[0], pair[1])

    def whole(x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        for norm1, projections, out, norm2, ffn_in, ffn_out in layers:
            qkv_BSO = linear(norm(x_BSD, norm1).to(dtype), *projections)
            q_BHSK, k_BHSK, v_BHSK = qkv_BSO.view(B, S, 3, case.heads, case.head_width).permute(2, 0, 3, 1, 4)
            context_BHSK = scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=case.causal)
            x_BSD = x_BSD + linear(context_BHSK.transpose(1, 2).reshape(B, S, D), *out)
            x_BSD = x_BSD + linear(gelu(linear(norm(x_BSD, norm2).to(dtype), *ffn_in)), *ffn_out)
        return norm(x_BSD, last)

    compiled = torch.compile(whole, mode="max-autotune", fullgraph=True, dynamic=False)

    def call(x_BSD: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x_BSD)

    return call
