"""What a layer holds beside its weights is what the plan counts, to the byte."""

import weakref
from typing import Any

import pytest
import torch
from stacks import small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frontier.layers import block as block_room
from frontier.layers import costs
from frontier.layers.attention import Kernel
from frontier.layers.weights import pack, seeded_state, tensors_of
from frontier.recipe import REFERENCE, parse_recipe


class Held(TorchDispatchMode):
    """Bytes of all storages made since `with`, at their highest."""

    def __init__(self, *before: Any) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in tree_leaves(before)}
        self.peak_bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = call(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.sizes:
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr(), None)
        self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))
        return answer


RECIPES = [
    "fp32/packed/flash", "fp32/separate/flash", "fp16/packed/flash", "fp16/packed/flash/held-ffn",
    "fp16/packed/flash/held-projections", "bf16/separate/flash/held-projections", "fp16/separate/flash/held-all",
]  # fmt: skip


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("ffn_dim", [16, 32, 64, 256])
@pytest.mark.parametrize("text", RECIPES)
def test_a_stack_holds_what_is_planned(monkeypatch: pytest.MonkeyPatch, text: str, ffn_dim: int, layers: int) -> None:
    for room in (block_room, costs):
        monkeypatch.setattr(room, "TILE_TOKENS", 64)
    # Attention itself is the kernels' own: this one holds its context and nothing else.
    only_context = Kernel(lambda q, k, v, causal: v.contiguous(), lambda case, recipe, machine: None)
    monkeypatch.setitem(block_room.ATTENTION, "flash", only_context)
    case = small(batch_size=1, seq_len=256, d_model=64, ffn_dim=ffn_dim, layers=layers)
    recipe = parse_recipe(text, REFERENCE)
    stack = pack(seeded_state(case), case, recipe, torch.device("cpu"))
    x_BSD = torch.randn(1, 256, 64)
    with Held(x_BSD, *tensors_of(stack)) as held:
        block_room.run_stack(x_BSD, stack, case, recipe)
    planned = costs.workspace_bytes(case, recipe, 1)
    del planned["attention log-sum-exp"]
    # One layer alone has no next projections to be joined with, which may hold most.
    assert held.peak_bytes == sum(planned.values()) or (layers == 1 and held.peak_bytes < sum(planned.values()))


@pytest.mark.parametrize("attention", ["dense", "flash"])
def test_many_short_rows_hold_what_one_tile_of_them_holds(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    for room in (block_room, costs):
        monkeypatch.setattr(room, "TILE_TOKENS", 64)
    case = small(batch_size=20, seq_len=20)
    recipe = parse_recipe(attention, REFERENCE)
    assert costs.rows_at_once(20) == 3 and costs.rows_at_once(65) == 1
    assert costs.workspace_bytes(case, recipe, 20) == costs.workspace_bytes(case, recipe, 3)
    stack, x_BSD = pack(seeded_state(case), case, recipe, torch.device("cpu")), torch.randn(20, 20, 32)
    with Held(x_BSD, *tensors_of(stack)) as held:
        block_room.forward(x_BSD, x_BSD, stack, case, recipe)
    assert held.peak_bytes <= sum(costs.workspace_bytes(case, recipe, 3).values())


def test_what_each_word_holds_is_in_the_ledger() -> None:
    case, base = small(batch_size=2, seq_len=1000), parse_recipe("fp16/packed/cudnn", REFERENCE)

    def held(words: str) -> int:
        return sum(costs.workspace_bytes(case, parse_recipe(words, base), 2).values())

    bare, rows = held("fp16"), 2 * 1000 * 32
    assert held("scores") - bare == 2 * 4 * rows + 2 * 2 * 4 * 1000 * 1000
    assert held("short") == bare
    assert held("triton-join") <= bare and held("triton-ffn") <= bare
    assert held("held-all") > bare
    assert held("tail") == 4 * rows * 2 + 2 * 4 * 1000 * 4  # q, k, v, context; log-sum-exp
    assert held("graph") == 2 * bare + costs.MOST_GRAPHS * 4 * rows
    assert held("stack") == 2 * rows * 3 * 2 + 2 * 2 * 2 * 63 * 4  # layers, tokens, q k v, half; two cuts' counters
