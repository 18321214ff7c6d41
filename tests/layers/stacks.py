"""Small cases, their rows, and one call of the stack."""

from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.block import forward
from frontier.layers.weights import pack, seeded_state
from frontier.recipe import REFERENCE, parse_recipe


def small(**sizes: Any) -> Case:
    shape = {"batch_size": 2, "seq_len": 37, "d_model": 32, "heads": 4, "ffn_dim": 48, "layers": 2}
    return Case(**{"name": "small", **shape, **sizes})


def run_stack(case: Case, recipe_text: str, x_BSD: Tensor, valid_BS: Tensor | None = None) -> Tensor:
    """The stack's output under a recipe, into a poisoned buffer."""
    recipe = parse_recipe(recipe_text, REFERENCE)
    out_BSD = torch.full_like(x_BSD, torch.nan)
    forward(x_BSD, out_BSD, pack(seeded_state(case), case, recipe, torch.device("cpu")), case, recipe, valid_BS)
    return out_BSD


def rows_of(case: Case, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randn(case.batch_size, case.seq_len, case.d_model, generator=generator) * scale
