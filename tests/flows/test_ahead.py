"""Inputs that are read ahead of the chunks that want them: their order, their buffers, their errors and their end."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import planned, small, through

from frontier.errors import DoesNotFit
from frontier.flows import ahead
from frontier.flows.ahead import InputsAhead
from frontier.flows.steps import Step
from frontier.ledger import inputs_ahead


def step(number: int) -> Step:
    made = Step(number, number + 1)
    made.row, made.layer, made.does, made.chunk = 0, 0, "enter", made
    return made


def test_each_input_is_read_once_in_order_and_the_next_is_begun() -> None:
    read: list[int] = []
    begun = threading.Event()

    def fill(one: Step, into: torch.Tensor) -> None:
        read.append(one.start)
        into.fill_(one.start)
        if one.start == 1:
            begun.set()

    inputs, steps = InputsAhead(3, 4, pinned=False), [step(n) for n in range(5)]
    inputs.expect(steps)
    assert inputs.take(fill).tolist() == [0.0] * 4
    assert begun.wait(5), "the second is read before it is asked for"
    for n in range(1, 5):
        assert inputs.take(fill).tolist() == [float(n)] * 4
    inputs.close()
    assert read == [0, 1, 2, 3, 4]


def test_an_error_of_a_read_is_raised_where_its_input_is_taken() -> None:
    def fill(one: Step, into: torch.Tensor) -> None:
        if one.start == 1:
            raise OSError("no such sector")

    inputs, steps = InputsAhead(3, 4, pinned=False), [step(n) for n in range(3)]
    inputs.expect(steps)
    inputs.take(fill)
    with pytest.raises(OSError, match="no such sector"):
        inputs.take(fill)
    inputs.close()


def test_a_new_pass_waits_for_what_an_earlier_one_left_begun() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def slow(one: Step, into: torch.Tensor) -> None:
        if one.start == 1:
            may_end.wait(5)
            ended.set()

    inputs, steps = InputsAhead(3, 4, pinned=False), [step(n) for n in range(3)]
    inputs.expect(steps)
    inputs.take(slow)
    threading.Timer(0.05, may_end.set).start()
    inputs.expect(steps)
    assert ended.is_set()
    inputs.take(slow)
    inputs.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frontier-ahead")]


def test_pages_are_unlocked_where_the_system_refuses_to_lock_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def pinned(floats: int) -> Any:
        if len(made) == 2:
            raise DoesNotFit("no more", hint="none")
        made.append(SimpleNamespace(tensor=torch.zeros(floats), released=False))
        made[-1].release = lambda own=made[-1]: setattr(own, "released", True)
        return made[-1]

    monkeypatch.setattr(ahead, "PinnedBuffer", pinned)
    with pytest.raises(DoesNotFit, match="no more"):
        InputsAhead(3, 4, pinned=True)
    assert [one.released for one in made] == [True, True]


@pytest.mark.parametrize(
    ("sizes", "depth", "masked", "count"),
    [
        ({"layers": 2}, 3, False, 3),
        ({"layers": 1}, 3, False, 4),
        ({"layers": 2}, 3, True, 4),
        ({"causal": False}, 3, False, 5),
    ],
)
def test_there_are_as_many_buffers_as_inputs_may_be_on_their_way(
    sizes: dict[str, Any], depth: int, masked: bool, count: int
) -> None:
    assert inputs_ahead(small(**sizes), depth, masked) == count


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_one_buffer_too_few_would_be_seen(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """An input that is read over another before that one's upload: here at once, since reading is quick."""
    case = small(seq_len=43, causal=causal, layers=1 if causal else 2, batch_size=3)
    made = planned(case, 8, "host", 3)
    want = through(made)
    monkeypatch.setattr("frontier.flows.chunked.inputs_ahead", lambda *given, **words: 1)
    assert not torch.equal(through(made), want)
