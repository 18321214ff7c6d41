"""What the one kernel keeps between its calls: memory of q, k and v, and counters."""

from typing import Any

import pytest
import torch
from stacks import rows_of, small

from frontier.case import Case
from frontier.layers import costs, stack, stack_cut
from frontier.layers.stack import StackProgram
from frontier.layers.stack_cut import Cut
from frontier.layers.weights import seeded_state
from frontier.recipe import REFERENCE, parse_recipe

LOOP = Cut("loop", 16, 16, 32, 4, 1)


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: LOOP)


def sized(**sizes: Any) -> Case:
    return small(**{"seq_len": 32, "d_model": 32, "heads": 2, "ffn_dim": 32, "layers": 2, **sizes})


def made(case: Case, words: str = "fp16/stack") -> StackProgram:
    return StackProgram(seeded_state(case), case, parse_recipe(words, REFERENCE), torch.device("cpu"))


def output_of(program: StackProgram, x_BSD: torch.Tensor) -> torch.Tensor:
    out_BSD = torch.full_like(x_BSD, torch.nan)
    program(x_BSD, out_BSD)
    return out_BSD


def test_a_batch_larger_than_the_scratch_takes_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sized(batch_size=5)
    once_BSD = output_of(made(case), rows_of(case))
    monkeypatch.setattr(costs, "STACK_SCRATCH_BYTES", 2 * 2 * 32 * 3 * 32 * 2)  # two rows
    program = made(case)
    assert torch.equal(once_BSD, output_of(program, rows_of(case)))
    assert [key[0] for key in program._scratch] == [2, 1]


def test_shapes_of_a_stream_share_the_memory_of_q_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller batch takes a larger one's room, a larger one its own; the answers are those of a program alone."""
    monkeypatch.setattr(stack, "SHAPES_KEPT", 2)
    words, places = "fp16/stack/held-small", []
    shared = made(sized(), words)
    for batch_size in (3, 2, 3, 5, 1):
        x_BSD = rows_of(sized(batch_size=batch_size)) * torch.tensor([0.1, 1, 1, 1, 1])[:batch_size, None, None]
        assert torch.equal(output_of(shared, x_BSD), output_of(made(sized(), words), x_BSD)), batch_size
        turns = next(reversed(shared._scratch.values())).turns
        assert turns[0].qkv is not turns[1].qkv
        places.append([turn.qkv.numel() for turn in turns])
    assert places[0] == places[1] == places[2] != places[3] == places[4]
    assert {room.numel() for room in shared._rooms.values()} == {*places[4]}
    shared._scratch.clear()
    del turns
    assert not shared._rooms


def test_counters_start_anew_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "CALLS_BEFORE_RESET", 2)
    program = made(sized())
    outputs = [output_of(program, rows_of(sized())) for _ in range(5)]
    (scratch,) = program._scratch.values()
    assert scratch.launches[0].calls == 1 and all(torch.equal(outputs[0], out_BSD) for out_BSD in outputs)
