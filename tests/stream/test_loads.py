"""Loads that move less than they are long, and loads that read what others wrote."""

import time

import pytest
import torch
from river import our_threads
from torch import Tensor

from frontier.spans import Span
from frontier.stream.lanes import Lanes
from frontier.stream.pipeline import stream
from frontier.stream.ring import make_ring
from frontier.stream.trace import Event, Trace

pytestmark = pytest.mark.timeout(20)


class Load(Span):
    """A load that says itself what it moves."""

    up: int = 0
    down: int = 0
    after: int | None = None


def load(length: int, up: int, down: int, after: int | None = None) -> Load:
    made = Load(0, length)
    made.up, made.down, made.after = up, down, after
    return made


def go(loads: list[Load], lanes: Lanes, depth: int, slow_write_s: float = 0.0) -> list[tuple[str, int, int]]:
    """(verb, turn, rows) of every call, in the order of its end; each load writes its turn, and reads what is there."""
    seen: list[tuple[str, int, int]] = []

    def turn_of(found: Load) -> int:
        return next(turn for turn, known in enumerate(loads) if known is found)

    def read(found: Load, pinned_in: Tensor) -> None:
        seen.append(("read", turn_of(found), len(pinned_in)))

    def work(found: Load, device_in: Tensor, device_out: Tensor, note: Tensor) -> None:
        assert (len(device_in), len(device_out)) == (found.up, found.down)
        device_out.fill_(turn_of(found))

    def write(found: Load, pinned_out: Tensor, note: Tensor) -> None:
        time.sleep(slow_write_s)
        assert bool((pinned_out == turn_of(found)).all())
        seen.append(("write", turn_of(found), len(pinned_out)))

    slots = make_ring(depth, (4, 3), torch.device("cpu"))
    stream(loads, slots, lanes, read=read, work=work, write=write, poison=True)
    assert not our_threads()
    return seen


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_load_moves_what_it_says_up_and_down(lanes: Lanes, depth: int) -> None:
    loads = [load(4, 4, 0), load(4, 0, 4), load(3, 2, 1), load(1, 0, 0)]
    seen = go(loads, lanes, depth)
    assert [(turn, rows) for verb, turn, rows in seen if verb == "read"] == list(enumerate([4, 0, 2, 0]))
    assert [(turn, rows) for verb, turn, rows in seen if verb == "write"] == list(enumerate([0, 4, 1, 0]))


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("distance", [1, 2, 4])
def test_a_load_is_read_when_what_it_reads_is_written(lanes: Lanes, depth: int, distance: int) -> None:
    loads = [load(4, 4, 4, after=turn - distance if turn >= distance else None) for turn in range(12)]
    seen = [(verb, turn) for verb, turn, _ in go(loads, lanes, depth, slow_write_s=0.002)]
    for turn in range(distance, 12):
        assert seen.index(("write", turn - distance)) < seen.index(("read", turn))


def test_a_load_that_does_not_wait_is_read_early_as_the_control_of_the_test_above(lanes: Lanes) -> None:
    seen = [(verb, turn) for verb, turn, _ in go([load(4, 4, 4) for _ in range(12)], lanes, 5, slow_write_s=0.002)]
    assert seen.index(("read", 4)) < seen.index(("write", 3))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_write_that_fails_wakes_the_reader_that_waits_for_it(lanes: Lanes, depth: int) -> None:
    def write(found: Load, pinned_out: Tensor, note: Tensor) -> None:
        time.sleep(0.01)
        raise ZeroDivisionError

    loads = [load(4, 4, 4, after) for after in (None, 0, 1)]
    slots = make_ring(depth, (4, 3), torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        stream(loads, slots, lanes, read=lambda *_: None, work=lambda *_: None, write=write)
    assert not our_threads()


def test_a_trace_calls_each_load_by_its_own_name(tmp_path) -> None:  # type: ignore[no-untyped-def]
    class Named(Load):
        def __str__(self) -> str:
            return "row 3 layer 1 0-7 meet 8-15"

    trace = Trace()
    trace(Event("compute", Named(0, 8), 0.0, 1.0))
    trace(Event("compute", Span(0, 8), 1.0, 2.0))
    trace.save(tmp_path / "t.json")
    assert '"compute row 3 layer 1 0-7 meet 8-15"' in (tmp_path / "t.json").read_text()
    assert '"compute 0-7"' in (tmp_path / "t.json").read_text()
