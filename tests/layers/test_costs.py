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
from frontier.layers.weights import pack, seeded_state
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


@pytest.mark.parametrize("ffn_dim", [16, 32, 64, 256])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_layer_holds_what_is_planned(monkeypatch: pytest.MonkeyPatch, precision: str, ffn_dim: int) -> None:
    for room in (block_room, costs):
        monkeypatch.setattr(room, "TILE_TOKENS", 64)
    # Attention itself is the kernels' own: this one holds its context and nothing else.
    only_context = Kernel(lambda q, k, v, causal: v.contiguous(), lambda case, recipe, machine: None)
    monkeypatch.setitem(block_room.ATTENTION, "flash", only_context)
    case = small(batch_size=1, seq_len=256, d_model=64, ffn_dim=ffn_dim)
    recipe = parse_recipe(f"{precision}/packed/flash", REFERENCE)
    stack = pack(seeded_state(case), case, recipe, torch.device("cpu"))
    x_BSD = torch.randn(1, 256, 64)
    layer = stack.layers[0]
    parts = (layer.norm1, layer.projections, layer.out, layer.norm2, layer.ffn_in, layer.ffn_out)
    with Held(x_BSD, *parts) as held:
        block_room.block(x_BSD, layer, case, recipe)
    planned = costs.workspace_bytes(case, recipe, 1)
    del planned["attention log-sum-exp"]
    assert held.peak_bytes == sum(planned.values())
