"""The drop-in gives the baseline's numbers wherever the script or its user may take it."""

import copy
import io
import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CONFIG, budget
from stand_in import BaselineTransformer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from frontier.adaptors.organizer import MOST_PROGRAMS, UserOptimizedTransformer, copy_model_weights
from frontier.errors import CaseError

FAST = "fp32/packed/flash"  # what the chooser takes on a CPU where no record speaks
TIGHT = 0.01  # of the rule: float32 against float32


def is_served(model: UserOptimizedTransformer) -> bool:
    return model.ran_last is not None and not model.ran_last.startswith("plain")


@pytest.mark.parametrize("mask", [None, "all_valid", "holes"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("train", [False, True])
def test_a_served_call_gives_the_baselines_numbers(pair: Any, mask: str | None, mode: Any, train: bool) -> None:
    pair.ours.train(train)
    valid = getattr(pair, mask) if mask else None
    with mode():
        got, want = pair.ours(pair.x, valid), pair.theirs(pair.x, valid)
    assert is_served(pair.ours) and budget(got, want) < TIGHT
    assert mask != "holes" or not got[~pair.holes].any()


def test_wrong_weights_would_be_seen(pair: Any) -> None:
    with torch.no_grad():
        pair.ours.final_norm.bias[7] += 0.01
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1


def test_it_draws_the_weights_that_the_baseline_draws() -> None:
    states = []
    for kind in (BaselineTransformer, UserOptimizedTransformer):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            states.append(kind(CONFIG).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_other_shapes_and_no_causal_mask_are_served_too(pair: Any) -> None:
    config = replace(CONFIG, causal=False, num_heads=1)
    theirs, ours = BaselineTransformer(config), UserOptimizedTransformer(config)
    copy_model_weights(theirs, ours)
    with torch.inference_mode():
        for B, S in ((1, 1), (2, 7), (5, 40)):
            x = torch.randn(B, S, 32)
            assert budget(ours(x), theirs(x)) < TIGHT and is_served(ours)
            assert budget(pair.ours(x), pair.theirs(x)) < TIGHT and is_served(pair.ours)


def test_a_config_that_fits_no_stack_is_refused() -> None:
    with pytest.raises(CaseError, match="d_model 32 does not divide into 5 heads"):
        UserOptimizedTransformer(replace(CONFIG, num_heads=5))


def padded() -> Tensor:
    """Where every query sees a key: elsewhere the plain softmax gives NaN, and its gradients are the baseline's NaN."""
    valid = torch.ones(3, 24, dtype=torch.bool)
    valid[1:, 20:] = False
    return valid


def test_gradients_flow_as_through_the_baseline(pair: Any) -> None:
    pair.ours(pair.x, padded()).square().sum().backward()
    pair.theirs(pair.x, padded()).square().sum().backward()
    assert pair.ours.ran_last == "plain: gradients are wanted"
    for (name, ours), theirs in zip(pair.ours.named_parameters(), pair.theirs.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4), name
    pair.ours.requires_grad_(False)
    pair.ours(pair.x)
    assert is_served(pair.ours)
    x = pair.x.clone().requires_grad_()
    pair.ours(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", ["all_valid", "holes"])
def test_other_dtypes_give_the_baselines_very_bits(pair: Any, dtype: torch.dtype, mask: str) -> None:
    valid = getattr(pair, mask)
    with torch.inference_mode():
        got = pair.ours.to(dtype)(pair.x.to(dtype), valid)
        assert torch.equal(got, pair.theirs.to(dtype)(pair.x.to(dtype), valid))
    assert pair.ours.ran_last == "plain: rows are not a float32 tensor"


def test_what_it_does_not_speed_up_it_computes_the_plain_way(pair: Any) -> None:
    ours, theirs, x = pair.ours, pair.theirs, pair.x
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    with torch.inference_mode():
        for rows, mask, reason in (
            (strided, None, "rows are not a contiguous, filled [B, S, D]"),
            (x[:0], None, "rows are not a contiguous, filled [B, S, D]"),
            (x, pair.holes[:1], "the mask is not bool [B, S] on the device of the rows"),
        ):
            assert torch.allclose(ours(rows, mask), theirs(rows, mask), atol=1e-5)
            assert ours.ran_last == f"plain: {reason}"
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(x).dtype == theirs(x).dtype
        assert ours.ran_last == "plain: autocast chooses the precision"
        with pytest.raises(RuntimeError):
            ours(torch.randn(2, 3, 31))
    got = torch.func.vmap(ours)(x[None].detach())
    assert torch.allclose(got[0], theirs(x), atol=1e-5)
    with torch.no_grad():
        graph = make_fx(ours)(x)
        assert torch.allclose(graph(2 * x), theirs(2 * x), atol=1e-5)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            slopes = [forward_ad.unpack_dual(model(dual)).tangent for model in (ours, theirs)]
            assert torch.allclose(*slopes, atol=1e-5)
    assert ours.ran_last == "plain: a transform looks at each operation"


def test_inputs_are_not_changed_and_outputs_are_ones_own(pair: Any) -> None:
    with torch.inference_mode():
        before, mask = pair.x.clone(), pair.holes.clone()
        first = pair.ours(pair.x, pair.holes)
        kept = first.clone()
        second = pair.ours(pair.x * 2, pair.holes)
        assert torch.equal(pair.x, before) and torch.equal(pair.holes, mask)
        assert torch.equal(first, kept) and first.data_ptr() != second.data_ptr()


def test_a_mask_is_read_anew_even_when_it_is_the_same_tensor(pair: Any) -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            mask = torch.ones(3, 24, dtype=torch.bool)
            pair.ours(pair.x, mask)
            mask.data[:, 20:] = False
            assert budget(pair.ours(pair.x, mask), pair.theirs(pair.x, mask)) < TIGHT


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_module_still_runs_the_recipe(pair: Any, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(pair.ours, backend=backend, fullgraph=True)
    with torch.inference_mode():
        for valid in (pair.all_valid, pair.holes):
            assert budget(compiled(pair.x, valid), pair.theirs(pair.x, valid)) < TIGHT
    assert pair.ours.runs == {FAST: 2}
    with torch.no_grad():
        compiled(pair.x)  # traced before the edit
        pair.ours.final_norm.bias += 1
        pair.theirs.final_norm.bias += 1
        assert budget(compiled(pair.x), pair.theirs(pair.x)) < TIGHT


def others(model: Any) -> dict[str, torch.Tensor]:
    return {name: 1.3 * parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_heeds_the_weights_that_it_is_given(pair: Any, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda model, given, x: torch.func.functional_call(model, given, (x,)), backend=backend)
    with torch.no_grad():
        pair.ours(pair.x)
        given = others(pair.theirs)
        got, want = compiled(pair.ours, given, pair.x), torch.func.functional_call(pair.theirs, given, (pair.x,))
        assert budget(got, want) < TIGHT < 1 < budget(want, pair.theirs(pair.x))
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT


def test_weights_that_are_edited_in_the_compiled_function_itself_are_followed(pair: Any) -> None:
    def between(model: Any, x: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        before = model(x)
        model.layers[0].ffn_in.weight.mul_(1.5)
        for parameter, other in zip(model.parameters(), given, strict=True):
            parameter.copy_(0.5 * (parameter + other))
        return before, model(x)

    torch.compiler.reset()
    compiled = torch.compile(between, backend="aot_eager")
    given = list(others(pair.theirs).values())
    with torch.no_grad():
        for _ in range(3):
            got, want = compiled(pair.ours, pair.x, given), between(pair.theirs, pair.x, given)
            assert budget(got[0], want[0]) < TIGHT and budget(got[1], want[1]) < TIGHT < 1 < budget(want[0], want[1])
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT


def test_a_compiled_function_over_many_batches_is_right(pair: Any) -> None:
    torch.compiler.reset()
    x = torch.stack([pair.x, 2 * pair.x])
    with torch.no_grad():
        got = torch.compile(torch.vmap(pair.ours), backend="aot_eager")(x)
        assert budget(got, torch.stack([pair.theirs(rows) for rows in x])) < TIGHT


def test_a_compiler_that_takes_every_trace_for_an_export_is_not_believed(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is PyTorch 2.11's: it would trace the plain way, and name nothing that ran."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())
    torch.compiler.reset()
    with torch.inference_mode():
        torch.compile(pair.ours, backend="eager", fullgraph=True)(pair.x, pair.all_valid)
    assert pair.ours.runs == {FAST: 1}


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_stands_alone(pair: Any, strict: bool) -> None:
    program = torch.export.export(pair.ours, (pair.x, pair.holes), strict=strict).module()
    assert "whole_stack" not in str(program.graph)
    assert torch.allclose(program(pair.x, pair.holes), pair.theirs(pair.x, pair.holes), atol=1e-5)
    traced = torch.jit.trace(pair.ours, (pair.x, pair.all_valid), check_trace=False)
    assert torch.allclose(traced(2 * pair.x, pair.holes), pair.theirs(2 * pair.x, pair.holes), atol=1e-5)


def test_a_compiled_module_is_trained_like_any_other(pair: Any) -> None:
    torch.compiler.reset()
    torch.compile(pair.ours, backend="aot_eager", fullgraph=True)(pair.x, padded()).sum().backward()
    pair.theirs(pair.x, padded()).sum().backward()
    ours, theirs = (m.layers[0].ffn_in.weight.grad for m in (pair.ours, pair.theirs))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_two_instances_alive_keep_their_own_weights(pair: Any) -> None:
    other = UserOptimizedTransformer(CONFIG)
    with torch.inference_mode():
        for _ in range(2):
            assert budget(pair.ours(pair.x), pair.theirs(pair.x)) < TIGHT
            assert budget(other(pair.x), pair.theirs(pair.x)) > 1


def test_threads_share_an_instance(pair: Any) -> None:
    faults: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for turn in range(20):
                x = torch.randn(1 + turn % 3, 24, 32, generator=generator)
                if not budget(pair.ours(x), pair.theirs(x)) < TIGHT:
                    faults.append(f"{seed}, {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [] and pair.ours.runs == {FAST: 60}


def as_saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), as_saved])
def test_a_copy_has_weights_and_programs_of_its_own(pair: Any, copied: Any) -> None:
    with torch.no_grad():  # in inference mode a copy's parameters could not be watched
        pair.ours(pair.x)
        twin = copied(pair.ours)
        pair.ours.final_norm.bias += 1
        assert budget(twin(pair.x), pair.theirs(pair.x)) < TIGHT and is_served(twin)
        assert budget(pair.ours(pair.x), pair.theirs(pair.x)) > 1
    assert twin.runs == {FAST: 1} and pair.ours.runs == {FAST: 2}


def test_programs_of_many_shapes_do_not_pile_up(pair: Any) -> None:
    with torch.inference_mode():
        for S in range(1, MOST_PROGRAMS + 4):
            pair.ours(pair.x[:, :S].contiguous())
    assert len(pair.ours._served) == MOST_PROGRAMS


def test_weights_that_do_not_fit_are_told(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    state = pair.theirs.state_dict()
    state["other"] = state.pop("final_norm.bias")
    strange = SimpleNamespace(state_dict=lambda: state)
    with pytest.raises(RuntimeError, match="Missing key"):
        copy_model_weights(strange, pair.ours)  # type: ignore[arg-type]
    copy_model_weights(strange, pair.ours, strict=False)  # type: ignore[arg-type]
    assert "missing optimized keys: ['final_norm.bias']" in capsys.readouterr().out
