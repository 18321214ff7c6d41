"""The drop-in on a card: streams, graphs, masks and weights that change while kernels are queued."""

from typing import Any

import pytest
import torch
from conftest import CONFIG, budget

from frontier.adaptors.organizer import UserOptimizedTransformer, copy_model_weights

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


@pytest.fixture
def on_card(pair: Any) -> Any:
    pair.ours.cuda(), pair.theirs.cuda()
    pair.x, pair.holes, pair.all_valid = pair.x.cuda(), pair.holes.cuda(), pair.all_valid.cuda()
    return pair


def busy() -> None:
    torch.cuda._sleep(200_000_000)  # some 0.1 s: whatever is queued behind it has not run when the host goes on


@torch.inference_mode()
def test_masks_made_by_queued_work_are_heeded(on_card: Any) -> None:
    for turn in range(6):
        busy()
        mask = torch.zeros_like(on_card.holes)
        mask |= on_card.holes if turn % 2 else on_card.all_valid
        got = on_card.ours(on_card.x, mask)
        mask.logical_not_()  # after the call a mask is the caller's again
        del mask
        want = on_card.theirs(on_card.x, on_card.holes if turn % 2 else on_card.all_valid)
        assert budget(got, want) < 1 and not on_card.ours.ran_last.startswith("plain")


@torch.inference_mode()
@pytest.mark.parametrize("held", [torch.nan, torch.inf, -1e25])
def test_what_cut_off_tokens_hold_reaches_no_valid_one(on_card: Any, held: float) -> None:
    """Rows that queued work spoils just before: the question is asked behind it."""
    lengths_B1 = torch.arange(len(on_card.x), device="cuda")[:, None] * 7
    padded = torch.arange(on_card.x.shape[1], device="cuda")[None] < on_card.x.shape[1] - lengths_B1
    clean = on_card.x * padded[..., None]
    busy()
    spoilt = clean.masked_fill(~padded[..., None], held)
    assert budget(on_card.ours(spoilt, padded), on_card.theirs(clean, padded)) < 1
    assert not on_card.ours.ran_last.startswith("plain")


@torch.no_grad()
def test_weights_that_change_between_queued_calls_are_followed(on_card: Any) -> None:
    for _ in range(4):
        busy()
        first, first_want = on_card.ours(on_card.x, on_card.all_valid), on_card.theirs(on_card.x)
        for model in (on_card.ours, on_card.theirs):
            model.layers[0].attention.v_proj.weight.mul_(-1.1)
        second, second_want = on_card.ours(on_card.x, on_card.all_valid), on_card.theirs(on_card.x)
        assert budget(first, first_want) < 1 and budget(second, second_want) < 1 < budget(first, second)


@torch.inference_mode()
def test_streams_have_programs_of_their_own(on_card: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    busy()
    here = on_card.ours(on_card.x, on_card.all_valid)
    with torch.cuda.stream(side):
        there = on_card.ours(2 * on_card.x, on_card.holes)
    torch.cuda.synchronize()
    assert budget(here, on_card.theirs(on_card.x)) < 1
    assert budget(there, on_card.theirs(2 * on_card.x, on_card.holes)) < 1


@torch.inference_mode()
def test_a_captured_call_follows_rows_masks_and_weights(on_card: Any) -> None:
    on_card.ours(on_card.x, on_card.all_valid)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_card.theirs(on_card.x, on_card.all_valid)  # libraries start up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = on_card.ours(on_card.x, on_card.all_valid)
    assert "captured" in on_card.ours.ran_last
    on_card.x.mul_(-1)
    on_card.all_valid.copy_(on_card.holes)
    for model in (on_card.ours, on_card.theirs):
        model.final_norm.bias.add_(1)
    graph.replay()
    assert budget(out, on_card.theirs(on_card.x, on_card.holes)) < 1


@torch.inference_mode()
def test_outputs_held_at_once_stay_different(on_card: Any) -> None:
    rows = [on_card.x * scale for scale in (1, 2, 3)]
    held = [on_card.ours(x, on_card.all_valid) for x in rows]
    assert all(budget(got, on_card.theirs(x)) < 1 for got, x in zip(held, rows, strict=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.inference_mode()
def test_a_compiled_module_runs_the_recipe_outside_of_graphs(on_card: Any, mode: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(on_card.ours, mode=mode)
    for _ in range(4):
        assert budget(compiled(on_card.x, on_card.holes), on_card.theirs(on_card.x, on_card.holes)) < 1
        assert not on_card.ours.ran_last.startswith("plain")


@torch.inference_mode()
def test_memory_is_bounded_over_many_shapes(on_card: Any) -> None:
    held = []
    for length in (*range(1, 25), *range(1, 25)):
        on_card.ours(on_card.x[:, :length].contiguous())
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[24:]) <= 1.1 * max(held[8:24])


@torch.inference_mode()
def test_a_call_does_not_wait_for_the_card() -> None:
    """With a mask the host may wait until the card reaches this call, never until it has done it."""
    model = UserOptimizedTransformer(CONFIG).cuda()
    copy_model_weights(UserOptimizedTransformer(CONFIG), model)
    x = torch.randn(3, 24, 32, device="cuda")
    model(x)
    torch.cuda.synchronize()
    busy()
    model(x)
    assert not torch.cuda.current_stream().query()
