"""Small rows through either flow on the host, and the same in float64 by the contract's formula."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from frontier.case import Case
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.flows.engine import Engine
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.planner import Keeping, Plan, Spool, plan
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.spans import Span

FLASH = parse_recipe("fp32/packed/flash", REFERENCE)
LAPTOP = Machine.detect("cpu")


def small(**sizes: Any) -> Case:
    shape = {"batch_size": 2, "seq_len": 33, "d_model": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
    return Case(**{"name": "small", **shape, **sizes})


def planned(
    case: Case, chunk: int | None, spool: Spool = "host", depth: int = 3, recipe: Recipe = FLASH, **asked: Any
) -> Plan:
    """Whole rows without a chunk."""
    flow = "whole" if chunk is None else "chunked"
    made = plan(case, LAPTOP, recipe, Keeping(output="memory"), flow=flow, chunk=chunk, ring_depth=depth, **asked)
    return made if chunk is None else dataclasses.replace(made, spool=spool)


def through(made: Plan, valid_BS: Tensor | None = None, lanes: Any = None, **options: Any) -> Tensor:
    """What comes out of one pass."""
    sink, source = MemorySink(made.case), SeededSource(made.case, 2)
    with Engine(made, seeded_state(made.case), valid_BS) as engine:
        if lanes is not None:
            engine.lanes = lanes
        engine.run_pass(source, sink, **options)
    source.close()
    return sink.host_BSD


def exact(case: Case, valid_BS: Tensor | None = None) -> Tensor:
    """The stack in float64, with a dense masked softmax."""
    w = {name: tensor.double() for name, tensor in seeded_state(case).items()}
    x = torch.empty(case.batch_size, case.seq_len, case.d_model)
    source = SeededSource(case, 2)
    source.read(Span(0, case.batch_size), x)
    source.close()
    x, S = x.double(), case.seq_len
    valid = torch.ones(case.batch_size, S, dtype=torch.bool) if valid_BS is None else valid_BS
    hidden = ~valid[:, None, :] | (torch.ones(S, S, dtype=torch.bool).triu(1) if case.causal else False)

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(h: Tensor, name: str) -> Tensor:
        return layer_norm(h, (case.d_model,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    for i in range(case.layers):
        at = f"layers.{i}"
        h = norm(x, f"{at}.norm1")
        q, k, v = (
            linear(h, f"{at}.attention.{part}_proj").unflatten(-1, (case.heads, -1)).transpose(1, 2) for part in "qkv"
        )
        scores = (q @ k.mT / case.head_width**0.5).masked_fill(hidden[:, None], -torch.inf)
        a = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).flatten(2)
        x = x + linear(a, f"{at}.attention.out_proj")
        h = norm(x, f"{at}.norm2")
        x = x + linear(gelu(linear(h, f"{at}.ffn_in")), f"{at}.ffn_out")
    return norm(x, "final_norm") * valid[..., None]


def holes(case: Case, share: float = 0.6) -> Tensor:
    """A mask with holes; the first row begins with a long empty stretch."""
    generator = torch.Generator().manual_seed(case.seq_len)
    valid_BS = torch.rand(case.batch_size, case.seq_len, generator=generator) < share
    valid_BS[0, : case.seq_len // 2] = False
    return valid_BS
