"""Both turns of the one kernel in one launch give the very bits of two launches, call after call."""

from typing import Any

import pytest
import torch
from stacks import rows_of, small

from frontier.case import Case
from frontier.layers import stack, stack_cut
from frontier.layers.program import make_program, refusal
from frontier.layers.stack import StackProgram
from frontier.layers.stack_cut import Cut
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

CPU = torch.device("cpu")
HEADS, SINGLE, LOOP = Cut("heads", 16, 32, 32, 4, 1), Cut("single", 16, 32, 16, 4, 2), Cut("loop", 16, 16, 32, 4, 1)
AGAIN = Cut("single", 32, 64, 16, 2, 1, 16)  # of another size and way than the first turn's


def sized(**sizes: Any) -> Case:
    return small(**{"seq_len": 32, "d_model": 32, "heads": 2, "ffn_dim": 32, "layers": 2, **sizes})


def made(case: Case, words: str) -> StackProgram:
    program = make_program(seeded_state(case), case, parse_recipe(words, REFERENCE), CPU)
    assert isinstance(program, StackProgram)
    return program


def pair(monkeypatch: pytest.MonkeyPatch, case: Case, first: Cut, held: str = "held-small") -> list[StackProgram]:
    """In two launches, and at once."""
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: AGAIN if "second" in given else first)
    return [made(case, f"fp16/{fusion}/{held}") for fusion in ("stack", "stack-at-once")]


def outputs_of(programs: list[StackProgram], x_BSD: torch.Tensor, *mask: Any) -> list[torch.Tensor]:
    outputs = [torch.full_like(x_BSD, torch.nan) for _ in programs]
    for program, out_BSD in zip(programs, outputs, strict=True):
        program(x_BSD, out_BSD, *mask)
    return outputs


def some_small(case: Case, call: int) -> torch.Tensor:
    """Other rows hold a small token at each call: none, the first, the last, all."""
    x_BSD = rows_of(case) * (3 + call)
    for b in ((), (0,), (case.batch_size - 1,), range(case.batch_size))[call % 4]:
        x_BSD[b, case.seq_len - 3] *= 0.05
    return x_BSD


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("cut", "held"), [(HEADS, "held-small"), (SINGLE, "held-output-small"), (LOOP, "held-ffn-small")], ids=str
)
def test_one_launch_gives_the_bits_of_two(monkeypatch: pytest.MonkeyPatch, cut: Cut, held: str, masked: bool) -> None:
    case = sized(batch_size=3, layers=1 + (cut is LOOP))
    monkeypatch.setattr(stack, "CALLS_BEFORE_RESET", 3)
    two, one = pair(monkeypatch, case, cut, held)
    valid_BS = torch.arange(case.seq_len).expand(3, case.seq_len) % 7 != 1 if masked else None
    for call in range(5):
        for scratch in one._scratch.values():
            for turn in scratch.turns:
                turn.qkv.fill_(torch.nan)
        assert torch.equal(*outputs_of([two, one], some_small(case, call), valid_BS)), call
    (scratch,) = one._scratch.values()
    assert len(scratch.launches) == 1 and scratch.launches[0].calls == 2


def test_a_length_that_fills_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sized(batch_size=2, seq_len=37)
    assert torch.equal(*outputs_of(pair(monkeypatch, case, LOOP), some_small(case, 2)))


def test_each_flag_tells_of_which_call_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls on, each tile's flag is twice the call's number, and one more where it held a small token."""
    case = sized(batch_size=3)
    two, one = pair(monkeypatch, case, SINGLE)
    x_BSD = some_small(case, 1)
    want_BSD, _ = outputs_of([two, one], x_BSD)
    (scratch,) = one._scratch.values()
    launch = scratch.launches[0]
    launch.calls = 1 << 10
    for turn in scratch.turns:
        for tile in range(turn.tiles):  # as after so many calls
            turn.published.view(case.batch_size, turn.tiles, case.layers)[:, tile] = launch.calls * tile
    assert torch.equal(want_BSD, *outputs_of([one], x_BSD))
    assert scratch.launches[0]._small.tolist() == [2 * 1024 + (b == 0 and t == 1) for b in range(3) for t in range(2)]


def test_without_rows_to_be_done_again_it_is_refused() -> None:
    for held in ("", "/held-all"):
        told = refusal(sized(), parse_recipe(f"fp16/stack-at-once{held}", REFERENCE), Machine.detect("cpu"))
        assert told is not None and told.endswith("does no rows again, neither at once nor later")
    recipe = parse_recipe("fp16/stack-at-once/held-small", REFERENCE)
    assert str(recipe) == "fp16/stack-at-once/held-small" and refusal(sized(), recipe, Machine.detect("cpu")) is None
