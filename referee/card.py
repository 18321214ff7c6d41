"""The layer stack in float64 on a device: block of queries by block of keys, nothing kept that is as long as a row.

Takes    a device and the bytes to hold on it; one row in host memory (without its invalid positions), weights by name.
Gives    what `referee.layer` gives, in the host's memory, and how much work that is on how fast a device.
Knows nothing of threads, files, masks or rules, nor of how the CPU goes about it: each is checked against the other.

Letters  S positions, P positions wanted, D width, F feed-forward width, H heads, K head width,
         Q queries of a block, M keys of a block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from referee.errors import CannotJudge
from referee.layer import Shape, Tick

MOST_QUERIES, LEAST_QUERIES, LEAST_KEYS = 1 << 17, 16, 8
WORKSPACE_BYTES = 64 << 20  # cuBLAS asks PyTorch's allocator for 32 MiB on Hopper


def open_device(name: str) -> torch.device:
    """The CUDA device of that name: `cuda` or `cuda:1`.

    Raises   CannotJudge, when there is none.
    """
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind != "cuda" or (index and not index.isdecimal()) or int(index or 0) >= count:
        raise CannotJudge(f"no device {name!r}: {count} CUDA devices are usable here", hint="use `--device cpu`")
    return torch.device("cuda", int(index or 0))


class Card:
    """A device, and blocks of queries and keys of which everything held at once fits in `most_bytes`.

    Raises   CannotJudge, with the sum, if not even the smallest blocks fit, or so much is not free.
    """

    def __init__(self, device: torch.device, shape: Shape, most_bytes: int) -> None:
        self.device, self.shape, self._most_bytes = device, shape, most_bytes
        self.queries, self.keys = MOST_QUERIES, MOST_QUERIES // 8
        while self.held_bytes() > most_bytes and self.queries > LEAST_QUERIES:
            self.queries //= 2
            self.keys = max(LEAST_KEYS, self.queries // 8)
        if self.held_bytes() > most_bytes:
            raise CannotJudge(
                f"the smallest blocks need {self.held_bytes():,} bytes on {device}, the bound is {most_bytes:,}",
                hint="raise `--memory`",
            )
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else most_bytes
        if free_bytes < self.held_bytes():
            raise CannotJudge(
                f"blocks of {self.held_bytes():,} bytes on {device}, where {free_bytes:,} are free",
                hint="lower `--memory`, or stop what else runs there",
            )

    def held_bytes(self) -> int:
        """At most, all at once: a layer's weights, one block of queries, one of keys, and two tiles of scores."""
        d, f, heads = self.shape.d_model, self.shape.ffn_dim, self.shape.heads
        weights = 4 * d * d + 2 * d * f + 16 * (d + f)
        queries = self.queries * (4 * d + 4 * heads + 4)
        keys = self.keys * (8 * d + 4 * f)
        tiles = self.queries * (2 * self.keys + self.keys // 8 + d // heads + 4)
        return 8 * (weights + queries + keys + tiles) + (WORKSPACE_BYTES if self.device.type == "cuda" else 0)

    def host_bytes(self, positions: int, picked: int) -> int:
        """In host memory: the float32 row; where layers meet, one float64 row beside the next; the answer twice."""
        return self.shape.d_model * (positions * (4 + 16 * (self.shape.layers > 1)) + 16 * picked)

    def measure(self, seconds: float = 0.4) -> tuple[float, float]:
        """FLOP/s of a product, and exponentials per second with all else that a tile costs beyond its products."""
        width = self.shape.d_model // self.shape.heads
        q_QK = torch.rand(self.queries, width, dtype=torch.float64, device=self.device)
        k_MK, a_QK, top_Q1 = q_QK[: self.keys], torch.zeros_like(q_QK), q_QK.new_zeros(self.queries, 1)
        sums_Q1, s_QM = torch.zeros_like(top_Q1), q_QK @ k_MK.T

        def time_one(work: Callable[[], object]) -> float:
            count, begun_s = -1, 0.0
            while count < 1 or time.perf_counter() - begun_s < seconds / 2:
                work()
                float(a_QK[0, 0] + s_QM[0, 0])  # waits for the device
                count += 1
                begun_s = begun_s if count else time.perf_counter()  # the first one warms up
            return (time.perf_counter() - begun_s) / count

        product_s = time_one(lambda: torch.mm(q_QK, k_MK.T, out=s_QM))
        pairs = s_QM.numel()
        s_QM = s_QM[:1, :1].clone()  # the tile makes its own
        tile_s = time_one(lambda: _meet(q_QK, k_MK, k_MK, None, a_QK, top_Q1, sums_Q1))
        return 2 * width * pairs / product_s, pairs / max(tile_s - 2 * product_s, 0.1 * product_s)

    def count_work(self, positions: int, picked_P: Tensor) -> tuple[float, float]:
        """FLOPs and exponentials of one row: with the hidden pairs of a tile, and keys made anew for every block."""
        d, f, flops, exps = self.shape.d_model, self.shape.ffn_dim, 0.0, 0.0
        for wanted_P in self._wanted(positions, picked_P):
            for wanted_Q in wanted_P.split(self.queries):
                keys = int(self._seen(wanted_Q, positions)[-1])
                flops += 4.0 * d * (d * keys + len(wanted_Q) * (d + f + keys))
                exps += float(self.shape.heads * len(wanted_Q) * keys)
        return flops, exps

    def run_stack(
        self, x_SD: Tensor, picked_P: Tensor, weights: Mapping[str, Tensor], tick: Tick = lambda flops: None
    ) -> Tensor:
        """The stack's float64 output `[P, D]` at the picked positions (ascending), in host memory as `x_SD` is.

        Raises   CannotJudge, if the device has no room after all.
        """
        try:
            for index, wanted_P in enumerate(self._wanted(len(x_SD), picked_P)):
                own = self._weights(weights, f"layers.{index}.")
                y_PD = torch.empty(len(wanted_P), x_SD.shape[1], dtype=torch.float64)
                for start in range(0, len(wanted_P), self.queries):
                    block = slice(start, start + self.queries)
                    y_PD[block] = self._layer(x_SD, wanted_P[block], own, tick).cpu()
                x_SD = y_PD
            final = self._weights(weights, "final_norm.")
            for y_MD in x_SD.split(self.keys):
                y_MD.copy_(_norm(self._bring(y_MD), final, ""))
            return x_SD
        except torch.OutOfMemoryError as fault:
            hint = "lower `--memory`, or stop what else runs there"
            raise CannotJudge(f"{self.device} has no room left: {str(fault).splitlines()[0]}", hint=hint) from fault

    def _wanted(self, positions: int, picked_P: Tensor) -> Iterator[Tensor]:
        """Which positions each layer is computed at: all, for the next one's keys depend on all; the last at few."""
        for _ in range(self.shape.layers - 1):
            yield torch.arange(positions)
        yield picked_P

    def _seen(self, wanted_Q: Tensor, positions: int) -> Tensor:
        """How many keys, from the first on, each query sees."""
        return wanted_Q + 1 if self.shape.causal else torch.full_like(wanted_Q, positions)

    def _weights(self, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): self._bring(w) for n, w in weights.items() if n.startswith(prefix)}

    def _bring(self, host: Tensor) -> Tensor:
        return host.to(self.device).double()

    def _layer(self, x_SD: Tensor, wanted_Q: Tensor, w: Mapping[str, Tensor], tick: Tick) -> Tensor:
        """One layer at one block of queries `[Q, D]`, on the device."""
        d, f = self.shape.d_model, self.shape.ffn_dim
        x_QD = self._bring(x_SD[wanted_Q])
        a_QD = self._attention(x_QD, x_SD, self._seen(wanted_Q, len(x_SD)), w, tick)
        for x_MD, a_MD in zip(x_QD.split(self.keys), a_QD.split(self.keys), strict=True):
            x_MD += _linear(a_MD, w, "attention.out_proj")
            inner_MF = functional.gelu(_linear(_norm(x_MD, w, "norm2."), w, "ffn_in"))  # the exact form
            x_MD += _linear(inner_MF, w, "ffn_out")
        tick(len(x_QD) * (2.0 * d * d + 4.0 * d * f))
        return x_QD

    def _attention(self, x_QD: Tensor, x_SD: Tensor, seen_Q: Tensor, w: Mapping[str, Tensor], tick: Tick) -> Tensor:
        """Softmax attention of one block of queries over all keys that it sees, heads side by side `[Q, D]`."""
        d, heads = self.shape.d_model, self.shape.heads
        seen_Q1, most, least = seen_Q.to(self.device)[:, None], int(seen_Q[-1]), int(seen_Q[0])
        q_QD = torch.cat([_linear(_norm(x_MD, w, "norm1."), w, "attention.q_proj") for x_MD in x_QD.split(self.keys)])
        q_QD /= math.sqrt(d // heads)
        tick(2.0 * d * d * len(q_QD))
        top_HQ1 = q_QD.new_full((heads, len(q_QD), 1), -math.inf)
        sums_HQ1, a_QD = torch.zeros_like(top_HQ1), torch.zeros_like(q_QD)
        for start in range(0, most, self.keys):
            h_MD = _norm(self._bring(x_SD[start : min(start + self.keys, most)]), w, "norm1.")
            k_MD, v_MD = (_linear(h_MD, w, f"attention.{part}_proj") for part in "kv")
            place_M = torch.arange(start, start + len(k_MD), device=self.device)
            hidden_QM = place_M >= seen_Q1 if start + len(k_MD) > least else None
            parts = (value_XD.chunk(heads, 1) for value_XD in (q_QD, k_MD, v_MD, a_QD))
            for head, (q_QK, k_MK, v_MK, a_QK) in enumerate(zip(*parts, strict=True)):
                _meet(q_QK, k_MK, v_MK, hidden_QM, a_QK, top_HQ1[head], sums_HQ1[head])
            tick(4.0 * d * len(k_MD) * (d + len(q_QD)))
        for a_QK, sums_Q1 in zip(a_QD.chunk(heads, 1), sums_HQ1, strict=True):
            a_QK /= sums_Q1
        return a_QD


def _meet(
    q_QK: Tensor, k_MK: Tensor, v_MK: Tensor, hidden_QM: Tensor | None, a_QK: Tensor, top_Q1: Tensor, sums_Q1: Tensor
) -> None:
    """Add one head's block of keys to what its queries have gathered: values, the largest score, and weights.

    Exact    a sum over keys of exp(score - top) v, where top is the largest score so far; what was summed under an
             earlier top is scaled to the new one. The first block holds key 0, which every query sees, so top is
             finite from then on, and a query that sees nothing of a later block adds exp(-inf) = 0.
    """
    s_QM = q_QK @ k_MK.T
    if hidden_QM is not None:
        s_QM.masked_fill_(hidden_QM, -math.inf)
    larger_Q1 = torch.maximum(top_Q1, s_QM.amax(1, keepdim=True))
    fade_Q1 = (top_Q1 - larger_Q1).exp()
    s_QM.sub_(larger_Q1).exp_()
    a_QK.mul_(fade_Q1).add_(s_QM @ v_MK)
    sums_Q1.mul_(fade_Q1).add_(s_QM.sum(1, keepdim=True))
    top_Q1.copy_(larger_Q1)


def _norm(x_MD: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    return functional.layer_norm(x_MD, x_MD.shape[-1:], w[f"{prefix}weight"], w[f"{prefix}bias"], eps=1e-5)


def _linear(x_MD: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x_MD, w[f"{name}.weight"], w[f"{name}.bias"])
