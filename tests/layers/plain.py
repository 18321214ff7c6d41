"""An independent baseline: the contract's stack as ordinary torch modules, with a dense masked softmax."""

import torch
from torch import Tensor, nn

from frontier.case import Case


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, h: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q @ k.mT) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        context = torch.softmax(scores.float(), -1).to(v.dtype) @ v
        return self.out_proj(context.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, ffn)
        self.ffn_out = nn.Linear(ffn, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.ffn_out(nn.functional.gelu(self.ffn_in(self.norm2(x))))


class Plain(nn.Module):
    """Modules are made in the order of the contract's names; every one draws from the global generator."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.causal = case.causal
        self.layers = nn.ModuleList(Block(case.d_model, case.heads, case.ffn_dim) for _ in range(case.layers))
        self.final_norm = nn.LayerNorm(case.d_model)

    @torch.no_grad()
    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Rows with hidden keys get -inf before softmax; outputs at invalid tokens are 0."""
        B, S, _ = x.shape
        hidden = torch.zeros(B, S, S, dtype=torch.bool)
        if self.causal:
            hidden |= torch.ones(S, S, dtype=torch.bool).triu(1)
        if valid is not None:
            hidden |= ~valid[:, None, :]
        for layer in self.layers:
            x = layer(x, hidden)
            if valid is not None:  # an invalid token may have had no visible key
                x = torch.where(valid[..., None], x, 0.0)
        y = self.final_norm(x)
        return y if valid is None else torch.where(valid[..., None], y, 0.0)


def plain(case: Case) -> Plain:
    """The baseline with the weights that the case's seed makes; the caller's random state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return Plain(case)
