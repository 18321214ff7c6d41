"""No output is of yesterday's weights, however they came to change; and a check that sees less would be seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CONFIG, budget
from torch import nn

from frontier.adaptors import organizer
from frontier.adaptors.organizer import UserOptimizedTransformer
from frontier.adaptors.watch import Watch

TIGHT = 0.01


def load(model: nn.Module) -> None:
    torch.manual_seed(77)
    model.load_state_dict(UserOptimizedTransformer(CONFIG).state_dict())


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        model.layers[0].attention.k_proj.weight.mul_(-1.5)


def edit_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model.layers[0].norm1.weight.mul_(2)


def edit_the_data(model: nn.Module) -> None:
    model.layers[1].attention.q_proj.weight.data.mul_(-2)


def initialise(model: nn.Module) -> None:
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.manual_seed(2)
            module.weight.data.normal_(0, 0.3)

    model.apply(draw)


def edit_a_state_dict(model: nn.Module) -> None:
    model.state_dict()["layers.1.ffn_in.weight"].mul_(3)


def step(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()


def step_fused(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.3, fused=True).step()  # of which PyTorch 2.13 keeps no count


def give_other_data(model: nn.Module) -> None:
    weight = model.layers[1].attention.out_proj.weight
    weight.data = -weight.detach()


def swap_tensors(model: nn.Module) -> None:
    torch.manual_seed(4)
    weight = model.layers[0].ffn_in.weight
    other = nn.Parameter(torch.randn_like(weight))
    with torch.no_grad():
        while other._version < weight._version:
            other.mul_(1)  # written to as often: the counts do not tell them apart
    torch.utils.swap_tensors(weight, other)


def assign_a_parameter(model: nn.Module) -> None:
    model.layers[0].ffn_out.bias = nn.Parameter(torch.linspace(-1, 1, 32))


def assign_a_module(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.layers[0].attention.v_proj = nn.Linear(32, 32)


def swap_two_layers(model: nn.Module) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def load_by_assignment(model: nn.Module) -> None:
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def to_half_and_back(model: nn.Module) -> None:
    model.half().float()


def hook(model: nn.Module) -> None:
    model.layers[1].ffn_in.register_forward_hook(lambda module, rows, answer: answer * 2)


CHANGES = [
    load, edit, edit_the_data, initialise, edit_in_inference_mode, edit_a_state_dict, step, step_fused, give_other_data,
    swap_tensors, assign_a_parameter, assign_a_module, swap_two_layers, load_by_assignment, to_half_and_back, hook,
]  # fmt: skip
STALE = [load, edit, edit_the_data, step_fused, assign_a_module, swap_two_layers]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_module_is_followed(pair: Any, change: Callable[[nn.Module], None]) -> None:
    with torch.no_grad():
        for _ in range(2):
            pair.ours(pair.x)
        old = pair.theirs(pair.x)
    change(pair.ours)
    change(pair.theirs)
    with torch.no_grad():
        assert change is to_half_and_back or budget(old, pair.theirs(pair.x)) > 1  # it does change something
        for x in (pair.x, pair.x[:1]):
            assert budget(pair.ours(x), pair.theirs(x)) < TIGHT
    assert pair.ours.ran_last == (
        "plain: `layers.1.ffn_in` has a forward hook" if change is hook else "fp32/packed/flash"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_module_that_was_compiled_before_its_first_call_is_followed(pair: Any, change: Any, mode: Any) -> None:
    """Inside of a compiled graph's operation PyTorch gives tensors that are detached a count of their own."""
    torch.compiler.reset()
    compiled = torch.compile(pair.ours, backend="aot_eager")
    with mode():
        compiled(pair.x)
    change(pair.ours)
    change(pair.theirs)
    with mode():
        want = pair.theirs(pair.x)
        assert budget(compiled(pair.x), want) < TIGHT and budget(pair.ours(pair.x), want) < TIGHT


@pytest.mark.parametrize("change", STALE, ids=lambda change: change.__name__)
def test_a_stale_cache_would_be_seen(pair: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(Watch, "unchanged", lambda self: True)
    with torch.no_grad():
        pair.ours(pair.x)
        change(pair.ours)
        change(pair.theirs)
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1


def test_a_watched_parameter_is_still_the_callers_own(pair: Any) -> None:
    parameters = list(pair.ours.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with torch.no_grad():
        pair.ours(pair.x)
        pair.theirs(pair.x)
    assert all(now is before for now, before in zip(pair.ours.parameters(), parameters, strict=True))
    pair.ours(pair.x).sum().backward()
    optimizer.step()
    torch.optim.SGD(pair.theirs.parameters(), lr=0.1).step()  # no gradients: nothing changes there
    with torch.no_grad():
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1


@pytest.mark.parametrize(
    ("part", "blind", "change"),
    [
        ("_version", lambda twin: 0, edit),
        ("Watch._same_things", lambda self: True, swap_two_layers),
        ("WatchedParameter.data", torch.Tensor.data, edit_the_data),
        ("type", lambda thing: type(thing) if isinstance(thing, nn.Module) else nn.Parameter, swap_tensors),
    ],
    ids=["versions", "identities", "uses", "types"],
)
def test_each_part_of_the_watch_is_needed(
    pair: Any, monkeypatch: pytest.MonkeyPatch, part: str, blind: Any, change: Any
) -> None:
    with torch.no_grad():
        pair.ours(pair.x)
        monkeypatch.setattr(f"frontier.adaptors.watch.{part}", blind, raising=False)
        pair.ours._watch, pair.ours._served = None, {}
        pair.ours(pair.x)
        change(pair.ours)
        change(pair.theirs)
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1


def test_an_unchanged_module_is_packed_once(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = organizer.make_program
    monkeypatch.setattr(organizer, "make_program", lambda *given: made.append(given) or make(*given))
    with torch.inference_mode():
        for _ in range(3):
            pair.ours(pair.x)
        assert len(made) == 1
    edit(pair.ours)
    with torch.inference_mode():
        pair.ours(pair.x)
        assert len(made) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.layers[0].norm1, "eps", 1e-3), "`layers.0.norm1` has another epsilon"),
        (lambda m: setattr(m.layers[0], "ffn_in", nn.Sequential(nn.Linear(32, 48))), "is a Sequential"),
        (lambda m: nn.utils.parametrizations.weight_norm(m.layers[1].ffn_out), "is a ParametrizedLinear"),
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(1))), "its parameters are not the contract's"),
        (lambda m: m.layers[0].double(), "is torch.float64 on cpu"),
    ],
)
def test_a_module_that_is_no_longer_the_stack_is_taken_as_it_is(pair: Any, change: Any, reason: str) -> None:
    change(pair.ours)
    with torch.inference_mode():
        try:
            pair.ours(pair.x)
        except RuntimeError:  # mixed dtypes: what the plain way says
            assert pair.ours.ran_last is None and "float64" in reason
        else:
            assert pair.ours.ran_last.startswith("plain: ") and reason in pair.ours.ran_last


def test_parameters_whose_edits_nobody_counts_are_not_cached() -> None:
    with torch.inference_mode():
        model = UserOptimizedTransformer(CONFIG)
        x = torch.randn(2, 24, 32)
        before = model(x)
        model.final_norm.bias += 1
        assert torch.allclose(model(x), before + 1)
    assert "made in inference mode" in str(model.ran_last)


def test_parameters_lent_for_one_call_are_those_used(pair: Any) -> None:
    lent = {name: parameter * 1.5 for name, parameter in pair.ours.named_parameters()}
    with torch.no_grad():
        before = pair.ours(pair.x)
        got = torch.func.functional_call(pair.ours, lent, (pair.x,))
        assert budget(got, torch.func.functional_call(pair.theirs, lent, (pair.x,))) < TIGHT and budget(got, before) > 1
        assert torch.equal(pair.ours(pair.x), before)
