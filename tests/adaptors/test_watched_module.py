"""What is looked at beside the weights; where looking ends; and what nobody can see, as the watch itself says."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CONFIG, budget
from test_fresh_weights import TIGHT, edit_the_data
from torch import nn

from frontier.adaptors import organizer
from frontier.adaptors.organizer import MOST_ATTEMPTS, UserOptimizedTransformer
from frontier.adaptors.plain import PlainStack


def set_epsilon(model: nn.Module) -> str:
    model.layers[1].norm2.eps = 0.5
    return "`layers.1.norm2` has another epsilon"


def set_causal(model: nn.Module) -> str:
    model.causal = False
    return "causal is False, the stack was made with True"


def set_config(model: nn.Module) -> str:
    model.config = SimpleNamespace(**{**vars(model.config), "causal": False})
    return "causal is False, the stack was made with True"


def set_heads(model: nn.Module) -> str:
    model.layers[0].attention.heads = 1
    return "`layers.0.attention` has 1 heads, the stack was made with 4"


def give_a_forward(model: nn.Module) -> str:
    linear = model.layers[0].ffn_in
    old = linear.forward
    linear.forward = lambda rows: 3 * old(rows)
    return "`layers.0.ffn_in` has a forward of its own"


def hook_everything(model: nn.Module) -> str:
    hook = lambda module, rows, answer: answer * 2 if isinstance(module, nn.Linear) else None  # noqa: E731
    nn.modules.module.register_module_forward_hook(hook)
    return "all modules have a forward hook"


@pytest.mark.parametrize("first", ["before", "after"])
@pytest.mark.parametrize("change", [set_epsilon, set_causal, set_config, set_heads, give_a_forward, hook_everything])
def test_a_changed_setting_is_followed(pair: Any, monkeypatch: pytest.MonkeyPatch, change: Any, first: str) -> None:
    hooks = nn.modules.module._global_forward_hooks
    try:
        with torch.inference_mode():
            old = pair.ours(pair.x) if first == "after" else pair.theirs(pair.x)
            reason = change(pair.ours)
            want = PlainStack.forward(pair.ours, pair.x)
            assert budget(old, want) > 1  # it does change something
            assert budget(pair.ours(pair.x), want) < TIGHT
            assert pair.ours.ran_last == f"plain: {reason}"
    finally:
        hooks.clear()


def put_an_equal_parameter(model: nn.Module) -> None:
    """In a place of its own it equals what stood there; edits of it are counted elsewhere."""
    linear = model.layers[0].ffn_in
    linear.bias = nn.Parameter(linear.bias.detach().clone())
    with torch.no_grad():
        linear.bias.add_(1)


def run_layers_in_another_order(model: nn.Module) -> None:
    layers = model.layers._modules
    layers["0"] = layers.pop("0")


def take_a_parameter_away_and_put_it_elsewhere(model: nn.Module) -> None:
    attention = model.layers[0].attention
    attention.q_proj.bias, attention.k_proj.bias = attention.k_proj.bias, attention.q_proj.bias


@pytest.mark.parametrize(
    "change", [put_an_equal_parameter, run_layers_in_another_order, take_a_parameter_away_and_put_it_elsewhere]
)
def test_what_stands_in_anothers_place_is_seen(pair: Any, change: Any) -> None:
    with torch.inference_mode():
        old = pair.ours(pair.x)
        change(pair.ours)
        want = PlainStack.forward(pair.ours, pair.x)
        assert budget(old, want) > 1
        assert budget(pair.ours(pair.x), want) < TIGHT


def test_uses_of_other_modules_data_are_no_edits_of_this_one(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other, made = UserOptimizedTransformer(CONFIG), []
    make = organizer.make_program
    with torch.no_grad():
        other(pair.x)
        monkeypatch.setattr(organizer, "make_program", lambda *given: made.append(given) or make(*given))
        for _ in range(3):
            pair.ours(pair.x)
            edit_the_data(other)
        assert len(made) == 1
        edit_the_data(pair.ours)
        pair.ours(pair.x)
        assert len(made) == 2


def test_weights_that_never_come_to_rest_are_taken_the_plain_way(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], organizer.make_program

    def restless(*given: Any) -> Any:
        made.append(given)
        program = make(*given)
        return lambda *call: (program(*call), next(pair.ours.parameters()).data)

    monkeypatch.setattr(organizer, "make_program", restless)
    with torch.inference_mode():
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT
    assert pair.ours.ran_last == "plain: its weights change while it runs" and len(made) == MOST_ATTEMPTS


@pytest.mark.parametrize(
    "edited",
    [
        lambda weight: weight.detach().numpy().__imul__(3),
        lambda weight: torch.from_dlpack(weight.detach()).mul_(3),
        lambda weight: weight.untyped_storage().copy_((3 * weight).detach().untyped_storage()),
    ],
    ids=["numpy", "dlpack", "storage"],
)
def test_what_the_watch_says_that_it_cannot_see_is_so_and_loading_mends_it(pair: Any, edited: Any) -> None:
    with torch.no_grad():
        pair.ours(pair.x)
        for model in (pair.ours, pair.theirs):
            edited(model.layers[0].attention.v_proj.weight)
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1
        pair.ours.load_state_dict(pair.ours.state_dict())
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT


def test_a_watched_parameter_may_be_made_a_parameter_again(pair: Any) -> None:
    with torch.no_grad():
        pair.ours(pair.x)
    for model in (pair.ours, pair.theirs):
        linear = model.layers[0].ffn_in
        linear.weight = nn.Parameter(linear.weight)
        nn.utils.parametrizations.weight_norm(model.layers[1].ffn_out)
        with torch.no_grad():
            linear.weight.mul_(1.5)
            model.layers[1].ffn_out.parametrizations.weight.original0.mul_(2)
    with torch.no_grad():
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT
    parameter = pair.ours.layers[0].ffn_in.bias
    assert type(copy.deepcopy(parameter)) is nn.Parameter and torch.equal(copy.deepcopy(parameter), parameter)
    assert not nn.Parameter(parameter, requires_grad=False).requires_grad
    assert type(parameter.detach()) is torch.Tensor
    assert all(type(tensor) is torch.Tensor for tensor in pair.ours.state_dict().values())
