"""The layer stack as ordinary PyTorch modules: the contract's names, and its arithmetic in the weights' own dtype.

Takes    sizes; then tokens and which of them are valid, or None.
Gives    the stack's output, differentiable; parameters by the contract's names, drawn in the contract's order.
Knows nothing of recipes, programs or caches.

Letters  B rows, S positions, D width, H heads, K head width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


class Attention(nn.Module):
    """Scores materialised, softmax statistics in float32."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, h_BSD: Tensor, valid_BS: Tensor | None, causal: bool) -> Tensor:
        # In half precision another order of operations rounds elsewhere, which the script counts as error: heads
        # are made contiguous, scores are scaled after their product, the softmax is cast before the next.
        q_BHSK, k_BHSK, v_BHSK = (
            part(h_BSD).unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores_BHSS = (q_BHSK @ k_BHSK.transpose(-2, -1)) * q_BHSK.shape[-1] ** -0.5
        if causal:
            later_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=h_BSD.device).triu(1)
            scores_BHSS = scores_BHSS.masked_fill(later_SS, -torch.inf)
        if valid_BS is not None:
            scores_BHSS = scores_BHSS.masked_fill(~valid_BS[:, None, None], -torch.inf)
        share_BHSS = scores_BHSS.float().softmax(-1).to(h_BSD.dtype)
        context_BSD = (share_BHSS @ v_BHSK).transpose(1, 2).contiguous().flatten(2)
        return _only_valid(self.out_proj(context_BSD), valid_BS)


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, d_model: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.norm2 = nn.LayerNorm(d_model)
        self.ffn_in = nn.Linear(d_model, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, d_model)

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None, causal: bool) -> Tensor:
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD), valid_BS, causal)
        x_BSD = x_BSD + self.ffn_out(gelu(self.ffn_in(self.norm2(x_BSD))))
        return _only_valid(x_BSD, valid_BS)


class PlainStack(nn.Module):
    """All layers and the norm that ends them."""

    def __init__(self, d_model: int, heads: int, ffn_dim: int, layers: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.layers = nn.ModuleList(Block(d_model, heads, ffn_dim) for _ in range(layers))
        self.final_norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, valid_token_mask, self.causal)
        return _only_valid(self.final_norm(x), valid_token_mask)


def _only_valid(x_BSD: Tensor, valid_BS: Tensor | None) -> Tensor:
    return x_BSD if valid_BS is None else x_BSD.masked_fill(~valid_BS[..., None], 0)
