"""The layer stack in float64: query block by query block, key block by key block, never all scores at once.

Takes    one row (without its invalid positions), weights by name, a crew and a bound on the scores in flight.
Gives    the row's output at every position, or at picked ones.
Knows nothing of files, masks, rules or what the output is compared with.

Letters  S positions, P positions wanted, D width, H heads, K head width, C positions of a block,
         Q queries of a block, M keys of a tile; 1 is K and one more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from referee.crew import Crew
from referee.errors import CannotJudge

Tick = Callable[[float], None]
# A tile of scores, 512 queries by 256 keys, is 1 MiB: it stays in a core's own cache between its three calls, and
# those hold Python's lock for 9 us of the 0.6 ms that a core works on them, so that sixteen threads rarely queue.
BLOCK_QUERIES, BLOCK_KEYS, BLOCK_LEAST = 512, 256, 16
BLOCK_POSITIONS = 512
# exp spans e-708 to e+709 in float64: scores within this bound need no maximum taken out first.
SAFE_SCORE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the formula needs to know beside the weights."""

    layers: int
    heads: int
    d_model: int
    ffn_dim: int
    causal: bool


def count_work(shape: Shape, positions: int, picked_P: Tensor) -> tuple[float, float]:
    """FLOPs and exponentials of one row: visible pairs only, a multiply and an add as two."""
    d, f, earlier = shape.d_model, shape.ffn_dim, shape.layers - 1
    all_pairs = positions * (positions + 1) // 2 if shape.causal else positions**2
    last_pairs = int((picked_P + 1).sum()) if shape.causal else positions * len(picked_P)
    pairs, queries = earlier * all_pairs + last_pairs, earlier * positions + len(picked_P)
    linears = 4 * d * d * (shape.layers * positions + queries) + 4 * d * f * queries
    return float(linears + 4 * d * pairs), float(shape.heads * pairs)


def block_of(threads: int, scores_bytes: int) -> tuple[int, int]:
    """Queries and keys of a block such that all threads' scores fit in `scores_bytes`.

    Raises   CannotJudge, with the sum, if not even the smallest blocks fit.
    """
    queries, keys = BLOCK_QUERIES, BLOCK_KEYS
    while 8 * threads * queries * keys > scores_bytes and queries > BLOCK_LEAST:
        queries, keys = queries // 2, keys // 2
    if 8 * threads * queries * keys > scores_bytes:
        least_bytes = 8 * threads * queries * keys
        raise CannotJudge(
            f"the scores of {threads} threads need {least_bytes:,} bytes at least, the bound is {scores_bytes:,}",
            hint="raise `--memory`, or lower `--threads`",
        )
    return queries, keys


def run_stack(
    x_SD: Tensor,
    picked_P: Tensor,
    weights: Mapping[str, Tensor],
    shape: Shape,
    crew: Crew,
    scores_bytes: int,
    tick: Tick = lambda flops: None,
) -> Tensor:
    """The stack's float64 output `[P, D]` at the picked positions (ascending). Uses up a float64 `x_SD`.

    Earlier layers are computed everywhere: every position of the last one depends on them.
    """
    x_SD = x_SD.double()
    for index in range(shape.layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): w.double() for name, w in weights.items() if name.startswith(prefix)}
        wanted_P = picked_P if index == shape.layers - 1 else torch.arange(len(x_SD))
        x_SD = _layer(x_SD, wanted_P, own, shape, crew, scores_bytes, tick)
    final = {name: weights[name].double() for name in ("final_norm.weight", "final_norm.bias")}

    def norm(block: slice) -> None:
        x_SD[block] = _norm(x_SD[block], final, "final_norm")

    crew.map(norm, _blocks(len(x_SD)))
    return x_SD


def _layer(
    x_SD: Tensor, wanted_P: Tensor, w: Mapping[str, Tensor], shape: Shape, crew: Crew, scores_bytes: int, tick: Tick
) -> Tensor:
    """One layer at the wanted positions; in place when those are all."""
    width = x_SD.shape[1]
    x_PD = x_SD if len(wanted_P) == len(x_SD) else x_SD[wanted_P]
    k_HSK = _heads(x_SD, w, "k_proj", shape.heads, crew, tick)
    # The ones behind each value make one product yield both the weighted sum of values and the sum of weights.
    v_HSK1 = _heads(x_SD, w, "v_proj", shape.heads, crew, tick, ones=1)
    q_HPK = _heads(x_PD, w, "q_proj", shape.heads, crew, tick)
    q_HPK /= math.sqrt(width // shape.heads)
    seen_P = wanted_P + 1 if shape.causal else torch.full_like(wanted_P, len(x_SD))
    a_PD = _attention(q_HPK, k_HSK, v_HSK1, seen_P, crew, scores_bytes, tick)

    def finish(block: slice) -> None:
        x_CD = x_PD[block]
        x_CD += _linear(a_PD[block], w, "attention.out_proj")
        inner_CF = _linear(_norm(x_CD, w, "norm2"), w, "ffn_in")
        inner_CF *= 0.5 * (1 + torch.erf(inner_CF / math.sqrt(2)))  # gelu, exact
        x_CD += _linear(inner_CF, w, "ffn_out")
        tick(len(x_CD) * (2.0 * width * width + 4.0 * width * inner_CF.shape[1]))

    crew.map(finish, _blocks(len(x_PD)))
    return x_PD


def _heads(
    x_SD: Tensor, w: Mapping[str, Tensor], part: str, heads: int, crew: Crew, tick: Tick, ones: int = 0
) -> Tensor:
    """norm1, then one of the three projections, as contiguous heads `[H, S, K + ones]`."""
    positions, width = x_SD.shape
    out_HSK = x_SD.new_ones(heads, positions, width // heads + ones)

    def project(block: slice) -> None:
        y_CD = _linear(_norm(x_SD[block], w, "norm1"), w, f"attention.{part}")
        out_HSK[:, block, : width // heads] = y_CD.view(len(y_CD), heads, -1).transpose(0, 1)
        tick(2.0 * len(y_CD) * width * width)

    crew.map(project, _blocks(positions))
    return out_HSK


def _attention(
    q_HPK: Tensor, k_HSK: Tensor, v_HSK1: Tensor, seen_P: Tensor, crew: Crew, scores_bytes: int, tick: Tick
) -> Tensor:
    """Softmax attention, heads side by side `[P, D]`; query p sees the first `seen_P[p]` keys (ascending)."""
    heads, wanted, head_width = q_HPK.shape
    queries, keys = block_of(crew.threads, scores_bytes)
    a_PHK = q_HPK.new_empty(wanted, heads, head_width)
    longest_key_H = torch.linalg.vector_norm(k_HSK, dim=-1).amax(1)
    tiles = [(k_HSK[head].split(keys), [v.T for v in v_HSK1[head].split(keys)]) for head in range(heads)]

    def attend(task: tuple[slice, int]) -> None:
        block, head = task
        q_QK, seen_Q = q_HPK[head, block], seen_P[block]
        # |q . k| <= |q| |k|; written so that NaN is unsafe too.
        bound = float(torch.linalg.vector_norm(q_QK, dim=-1).amax() * longest_key_H[head])
        a_PHK[block, head] = _attend(q_QK, *tiles[head], seen_Q, bound <= SAFE_SCORE)
        tick(4.0 * head_width * float(seen_Q.sum()))

    # The last queries see most, so they go first and the short ones fill the gaps at the end.
    crew.map(attend, [(block, head) for block in reversed(_blocks(wanted, queries)) for head in range(heads)])
    return a_PHK.flatten(1)


def _attend(q_QK: Tensor, keys_MK: Sequence[Tensor], values_1M: Sequence[Tensor], seen_Q: Tensor, safe: bool) -> Tensor:
    """One block of queries of one head: sum of exp(score) v, over the sum of exp(score).

    Exact    softmax is the same for any shift of a query's scores, so the maximum is taken out only where exp
             could overflow; then by a first sweep over all keys.
    """
    shift_Q = None
    if not safe:
        shift_Q = torch.stack([s_MQ.amax(0) for s_MQ in _scores(q_QK, keys_MK, seen_Q)]).amax(0)
    sums_1Q = q_QK.new_zeros(q_QK.shape[1] + 1, len(q_QK))
    for s_MQ, v_1M in zip(_scores(q_QK, keys_MK, seen_Q), values_1M, strict=False):
        if shift_Q is not None:
            s_MQ -= shift_Q
        sums_1Q.addmm_(v_1M, s_MQ.exp_())
    return (sums_1Q[:-1] / sums_1Q[-1]).T


def _scores(q_QK: Tensor, keys_MK: Sequence[Tensor], seen_Q: Tensor) -> Iterator[Tensor]:
    """The scores of a block of queries, tile by tile of keys, each in the same memory; hidden ones are -inf.

    Keys first in memory: up to 10 % faster than queries first in MKL's float64 product (one Zen 4 core).
    """
    first, last, start = int(seen_Q[0]), int(seen_Q[-1]), 0
    room_MQ = q_QK.new_empty(len(keys_MK[0]), len(q_QK))
    for k_MK in keys_MK:
        if start >= last:
            return
        s_MQ = room_MQ if len(k_MK) == len(room_MQ) else room_MQ[: len(k_MK)]
        torch.mm(k_MK, q_QK.T, out=s_MQ)
        if start + len(k_MK) > first:
            s_MQ.masked_fill_(torch.arange(start, start + len(k_MK))[:, None] >= seen_Q, -math.inf)
        yield s_MQ
        start += len(k_MK)


def _norm(x_CD: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    centred_CD = x_CD - x_CD.mean(-1, keepdim=True)
    return (
        centred_CD / (centred_CD.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def _linear(x_CD: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return x_CD @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _blocks(total: int, size: int = BLOCK_POSITIONS) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
