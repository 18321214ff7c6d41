"""Programs under the drop-in: masks are looked at while the card works, memory that runs out is stepped down from."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CONFIG, budget
from stand_in import BaselineTransformer
from torch import Tensor

from frontier.adaptors import organizer
from frontier.adaptors.organizer import UserOptimizedTransformer, copy_model_weights
from frontier.adaptors.served import Oracle, Served, by_slices
from frontier.recipe import REFERENCE


class Double:
    """A program that doubles valid tokens, and remembers what it was called with."""

    def __init__(self, *, takes_device_masks: bool = False, failures: int = 0) -> None:
        self.takes_device_masks, self.failures = takes_device_masks, failures
        self.masks: list[Tensor | None] = []
        self.rows: list[int] = []

    def __call__(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("planted")
        self.masks.append(valid_BS)
        self.rows.append(len(x_BSD))
        out_BSD.copy_(2 * x_BSD)
        if valid_BS is not None:
            out_BSD[~valid_BS] = 0


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the drop-in make these programs, in turn, instead of its own; gives the recipes it asked for."""

    def plant(*programs: Double) -> list[str]:
        asked: list[str] = []
        turn = iter(programs)
        monkeypatch.setattr(
            organizer, "make_program", lambda state, case, recipe, device: asked.append(str(recipe)) or next(turn)
        )
        return asked

    return plant


@torch.inference_mode()
def test_a_program_that_takes_device_masks_gets_every_mask_as_it_is(pair: Any, plant: Any) -> None:
    program = Double(takes_device_masks=True)
    plant(program)
    for mask in (pair.all_valid, pair.holes, None):
        pair.ours(pair.x, mask)
    assert program.masks[0] is pair.all_valid and program.masks[1] is pair.holes and program.masks[2] is None


@torch.inference_mode()
def test_other_programs_never_see_an_all_true_mask(pair: Any, plant: Any) -> None:
    program = Double()
    plant(program)
    for mask in (pair.all_valid, pair.holes):
        pair.ours(pair.x, mask)
    assert program.masks[0] is None and torch.equal(program.masks[1], pair.holes)  # type: ignore[arg-type]


@torch.inference_mode()
def test_memory_that_runs_out_is_stepped_down_from_once_and_told(
    pair: Any, plant: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = plant(Double(failures=1), Double())
    assert torch.equal(pair.ours(pair.x), 2 * pair.x)
    name = f"{REFERENCE} (as fp32/packed/flash ran out of memory)"
    assert pair.ours.ran_last == name and asked == ["fp32/packed/flash", str(REFERENCE)]
    told = f"frontier: fp32/packed/flash ran out of memory at [3, 24, 32]; now {REFERENCE}\n"
    assert capsys.readouterr().err == told
    pair.ours(pair.x)
    assert pair.ours.runs == {name: 2} and capsys.readouterr().err == ""


@torch.inference_mode()
@pytest.mark.parametrize("failures", [(1, 1), (2, 1)])
def test_memory_that_runs_out_twice_is_an_error(pair: Any, plant: Any, failures: tuple[int, int]) -> None:
    plant(*(Double(failures=number) for number in failures))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        pair.ours(pair.x)


@torch.inference_mode()
def test_memory_that_runs_out_while_packing_is_stepped_down_from_too(pair: Any, monkeypatch: Any) -> None:
    make = organizer.make_program

    def fail_unless_reference(state: Any, case: Any, recipe: Any, device: Any) -> Any:
        if recipe != REFERENCE:
            raise torch.OutOfMemoryError("planted")
        return make(state, case, recipe, device)

    monkeypatch.setattr(organizer, "make_program", fail_unless_reference)
    assert budget(pair.ours(pair.x, pair.holes), pair.theirs(pair.x, pair.holes)) < 0.01


def test_a_batch_too_large_for_one_call_goes_in_several(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Double()
    out = torch.empty_like(pair.x)
    by_slices(program, 2)(pair.x, out, pair.holes)
    assert program.rows == [2, 1] and torch.equal(out, 2 * pair.x * pair.holes[..., None])
    monkeypatch.setattr(organizer, "most_rows_per_call", lambda case: 2)
    with torch.inference_mode():
        assert budget(pair.ours(pair.x, pair.holes), pair.theirs(pair.x, pair.holes)) < 0.01
    monkeypatch.setattr(organizer, "most_rows_per_call", lambda case: 0)
    with torch.inference_mode():
        pair.ours(pair.x[:2])
    assert "more than 2^31 elements" in pair.ours.ran_last


@torch.inference_mode()
def test_tokens_cut_off_at_the_end_cost_no_masked_pass(pair: Any, plant: Any) -> None:
    program = Double()
    plant(program)
    padded = torch.arange(24)[None] < torch.tensor([24, 9, 0])[:, None]
    assert torch.equal(pair.ours(pair.x, padded), 2 * pair.x * padded[..., None])
    assert program.masks == [None]


@torch.inference_mode()
@pytest.mark.parametrize("causal", [True, False])
def test_tokens_cut_off_at_the_end_give_the_baselines_numbers(causal: bool) -> None:
    theirs, ours = (kind(replace(CONFIG, causal=causal)) for kind in (BaselineTransformer, UserOptimizedTransformer))
    copy_model_weights(theirs, ours)
    x = torch.randn(3, 24, 32)
    padded = torch.arange(24)[None] < torch.tensor([24, 9, 1])[:, None]
    assert budget(ours(x, padded), theirs(x, padded)) < 0.01
    if not causal:  # what would be wrong there
        assert budget(ours(x) * padded[..., None], theirs(x, padded)) > 1


@torch.inference_mode()
@pytest.mark.parametrize("held", [torch.nan, torch.inf, -1e25])
def test_what_cut_off_tokens_hold_reaches_no_valid_one(pair: Any, held: float) -> None:
    padded = torch.arange(24)[None] < torch.tensor([24, 9, 0])[:, None]
    clean = pair.x * padded[..., None]
    spoilt = clean.masked_fill(~padded[..., None], held)
    assert budget(pair.ours(spoilt, padded), pair.theirs(clean, padded)) < 0.01


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in which order, with streams and events of the host's."""
    order: list[str] = []

    def event(name: str) -> Any:
        return SimpleNamespace(
            record=lambda: order.append(f"{name} recorded"), synchronize=lambda: order.append(f"{name} waited for")
        )

    def make(oracle: Oracle, device: torch.device) -> None:
        oracle._side = SimpleNamespace(wait_event=lambda event: order.append("side waits"))  # type: ignore[assignment]
        oracle._marked, oracle._answered = event("mark"), event("answer")
        oracle._answer = torch.empty((), dtype=torch.bool)

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Oracle, "__init__", make)
    return order


def test_on_a_card_the_launch_comes_before_the_question(pair: Any, order: list[str]) -> None:
    def program(x: Tensor, out: Tensor, valid: Tensor | None = None) -> None:
        order.append("launched" if valid is None else "launched with mask")
        Double()(x, out, valid)

    served = Served(program, REFERENCE, "double", torch.device("cuda"), causal=True)
    out, question = torch.empty_like(pair.x), ["side waits", "answer recorded", "answer waited for"]
    padded = torch.arange(24)[None] < torch.tensor([24, 9, 0])[:, None]
    for mask, expected in (
        (None, ["launched"]),
        (pair.all_valid, ["mark recorded", "launched", *question]),
        (padded, ["mark recorded", "launched", *question, *question]),
        (pair.holes, ["mark recorded", "launched", *question, *question, "launched with mask"]),
        (pair.holes, ["mark recorded", *question, *question, "launched with mask"]),  # it has learnt to ask first
        (pair.all_valid, ["mark recorded", *question, "launched"]),
        (pair.all_valid, ["mark recorded", "launched", *question]),
    ):
        order.clear()
        served.run(pair.x, out.fill_(torch.nan), mask)
        assert order == expected
        assert torch.equal(out, 2 * pair.x * (1 if mask is None else mask[..., None]))
