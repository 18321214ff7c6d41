"""One chunk of a row in the middle of the stack: its residual, its queries, and its attention so far.

Takes    float32 positions, packed weights, keys and values of other chunks.
Gives    the chunk's own keys and values; its residual behind each layer.
Knows nothing of spools, lanes or in which order chunks meet.

Letters  C positions of the largest chunk, N of this one, M positions of a key chunk, D width, H heads, K head width.
"""

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.block import lead_on
from frontier.layers.costs import most_positions_per_call
from frontier.layers.merge import merge
from frontier.layers.weights import Layer, Norm, Stack, working_dtype
from frontier.recipe import Recipe


class Chunk:
    """Buffers for chunks of up to `positions`, taken once; one chunk at a time is in them.

    Order    of one chunk: `begin`, then for each layer `attend_own`, `meet` for other chunks, `end`, which may lead
             on to the next layer; a chunk that waits for others between layers begins each layer anew.
    Exact    the recipe's formula is `block.py`'s; only attention is cut, and merged in float32.
    """

    def __init__(self, positions: int, stack: Stack, case: Case, recipe: Recipe, device: torch.device) -> None:
        kernel = ATTENTION[recipe.attention]
        assert kernel.attend_lse is not None, f"{recipe.attention} tells no log-sum-exp"
        assert positions <= most_positions_per_call(case), (positions, most_positions_per_call(case))
        self._kernel, self._stack, self._case, self._recipe = kernel.attend_lse, stack, case, recipe
        self._x_CD = torch.empty(positions, case.d_model, device=device)
        self._qkv_C3D = torch.empty(positions, 3 * case.d_model, dtype=working_dtype(recipe), device=device)
        self._out_CD = torch.empty(positions, case.d_model, device=device)
        self._lse_HC = torch.empty(case.heads, positions, device=device)
        self._count = 0

    @property
    def residual(self) -> Tensor:
        """`[N, D]`; behind the last norm the stack's output."""
        return self._x_CD[: self._count]

    @property
    def keys_values(self) -> Tensor:
        """The chunk's own keys, then values, of the layer begun last, position by position: `[N, 2D]`."""
        return self._qkv_C3D[: self._count, self._case.d_model :]

    def begin(self, x_ND: Tensor, layer: int) -> None:
        """Take a chunk's residual before `layer`; make its q, k and v there."""
        self._count = len(x_ND)
        self.residual.copy_(x_ND)
        lead_on(self.residual, None, None, self._qkv_C3D[: self._count], self._stack.layers[layer], self._recipe)

    def attend_own(self) -> None:
        """Attention among the chunk's own positions: the only call in which anything is hidden."""
        q_1NHK, k_1NHK, v_1NHK = (self._heads(part) for part in self._qkv_C3D[: self._count].chunk(3, dim=1))
        context_1NHK, lse_1HN = self._attend(q_1NHK, k_1NHK, v_1NHK, self._case.causal)
        self._heads(self._out_CD[: self._count]).copy_(context_1NHK)
        self._lse_HC[:, : self._count] = lse_1HN[0]

    def meet(self, kv_M2D: Tensor) -> None:
        """Attend to another chunk's keys, all of them visible."""
        q_1NHK = self._heads(self._qkv_C3D[: self._count, : self._case.d_model])
        k_1MHK, v_1MHK = (self._heads(part) for part in kv_M2D.chunk(2, dim=1))
        context_1NHK, lse_1HN = self._attend(q_1NHK, k_1MHK, v_1MHK, False)
        out_NHK = self._heads(self._out_CD[: self._count])[0]
        merge(out_NHK, self._lse_HC[:, : self._count], context_1NHK[0], lse_1HN[0])

    def end(self, layer: int, leads_on: bool) -> None:
        """The rest of `layer` behind its attention, and the norm behind the last; `leads_on` begins the next layer."""
        layers = self._stack.layers
        following: Layer | Norm | None = layers[layer + 1] if leads_on else None
        if layer + 1 == len(layers):
            following = self._stack.final_norm
        context_ND, qkv_N3D = self._out_CD[: self._count], self._qkv_C3D[: self._count]
        lead_on(self.residual, context_ND, layers[layer], qkv_N3D, following, self._recipe)

    def _attend(self, q_1NHK: Tensor, k_1MHK: Tensor, v_1MHK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        # Kernels align the edge of a causal call top-left or bottom-right, which is the same where it is square.
        assert not causal or q_1NHK.shape == k_1MHK.shape, (tuple(q_1NHK.shape), tuple(k_1MHK.shape))
        return self._kernel(q_1NHK, k_1MHK, v_1MHK, causal)

    def _heads(self, part_ND: Tensor) -> Tensor:
        """`[N, D]` as a batch of one row, `[1, N, H, K]`."""
        heads_1NHK: Tensor = part_ND.unflatten(1, (self._case.heads, self._case.head_width))[None]
        return heads_1NHK
