"""Small cases, a made-up machine and one call of the stack, for all tests of this room."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.block import forward
from frontier.layers.weights import pack, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe
from frontier.units import GIB


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


@pytest.fixture
def make_case() -> Callable[..., Case]:
    return small


@pytest.fixture
def laptop() -> Machine:
    return Machine(
        device="cpu", name="laptop", host_total_bytes=8 * GIB, host_available_bytes=4 * GIB, cores=2,
        device_budget_bytes=2 * GIB, pinned_budget_bytes=2 * GIB, host_budget_bytes=4 * GIB,
    )  # fmt: skip
