"""Rows cut into chunks equal whole rows and float64, at any length, from any spool, at any depth."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from river import DelayedLanes
from rows import FLASH, exact, holes, planned, small, through

from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.data.spool import MemorySpool
from frontier.flows.chunked import ChunkedRows
from frontier.flows.engine import Engine, NotFinite
from frontier.flows.steps import Step, Steps
from frontier.layers import costs
from frontier.layers.chunk import Chunk
from frontier.layers.weights import pack, seeded_state
from frontier.recipe import REFERENCE, parse_recipe
from frontier.spans import Span
from frontier.stream.trace import Event, Trace, Verb

pytestmark = pytest.mark.timeout(60)
CUTS = [(1, 1), (1, 8), (5, 1), (7, 8), (8, 8), (9, 8), (31, 8), (97, 32)]  # primes, 1, chunk - 1, chunk + 1


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("seq_len", "chunk"), CUTS)
def test_chunks_are_as_near_to_float64_as_whole_rows(seq_len: int, chunk: int, causal: bool, masked: bool) -> None:
    case = small(seq_len=seq_len, causal=causal)
    valid_BS = holes(case) if masked else None
    want = exact(case, valid_BS)
    whole_error = (through(planned(case, None), valid_BS) - want).abs().max()
    for spool in ("card", "pinned", "host"):
        got = through(planned(case, chunk, spool), valid_BS, poison=True)  # type: ignore[arg-type]
        assert (got - want).abs().max() <= 2 * whole_error + 1e-6, spool
        if valid_BS is not None:
            assert bool((got[~valid_BS] == 0).all())


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "words", ["fp16/packed/dense", "bf16/separate/dense", "fp16/packed/dense/held-all", "fp32/separate/dense"]
)
def test_any_precision_stays_within_twice_the_error_of_whole_rows(words: str, causal: bool, masked: bool) -> None:
    case, recipe = small(seq_len=43, causal=causal), parse_recipe(words, REFERENCE)
    valid_BS = holes(case) if masked else None
    want = exact(case, valid_BS)
    whole, card, host = (
        through(planned(case, chunk, spool, recipe=recipe), valid_BS, poison=True)  # type: ignore[arg-type]
        for chunk, spool in ((None, "card"), (9, "card"), (9, "host"))
    )
    assert torch.equal(card, host)
    assert (card - want).norm() <= 1.5 * (whole - want).norm() + 1e-6
    assert (whole - want).norm() > 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_spool_and_depth_change_no_bit(causal: bool) -> None:
    case = small(seq_len=43, causal=causal, layers=3)
    want = through(planned(case, 8, "host", 1))
    for spool, depth in (("host", 2), ("host", 7), ("disk", 3), ("pinned", 1), ("pinned", 2), ("pinned", 7)):
        assert torch.equal(through(planned(case, 8, spool, depth), poison=True), want), (spool, depth)  # type: ignore[arg-type]
    # On the card a chunk meets all keys on one side of it at once: the same to rounding, and to the bit at any depth.
    on_card = [through(planned(case, 8, "card", depth), poison=True) for depth in (1, 3)]
    assert torch.equal(*on_card) and 0 < float((on_card[0] - want).abs().max()) < 1e-5


@pytest.mark.parametrize("share", [0.0, 0.02, 0.98])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_chunks_without_a_valid_token_meet_nobody(causal: bool, share: float) -> None:
    case = small(seq_len=50, causal=causal)
    valid_BS = holes(case, share)
    got = through(planned(case, 6), valid_BS)
    assert torch.allclose(got.double(), exact(case, valid_BS), atol=1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_lanes_that_are_late_change_no_bit(depth: int, causal: bool) -> None:
    case = small(seq_len=43, causal=causal, batch_size=1)
    want = through(planned(case, 8, "host", 1))
    lanes = DelayedLanes(0.001)
    try:
        assert torch.equal(through(planned(case, 8, depth=depth), lanes=lanes, poison=True), want)
    finally:
        lanes.close()


@pytest.mark.parametrize("skip", ["upload", "compute", "download"])
def test_a_verb_that_is_left_out_would_be_seen(skip: Verb) -> None:
    made = planned(small(seq_len=20), 8)
    lanes = DelayedLanes(0.0, skip=[skip])
    try:
        with pytest.raises(NotFinite):
            through(made, lanes=lanes, poison=True)
    finally:
        lanes.close()


def without_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Chunk.meet
    calls = iter(range(1000))
    monkeypatch.setattr(Chunk, "meet", lambda self, kv: meet(self, kv) if next(calls) != 4 else None)


def with_a_meeting_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = Chunk.meet

    def twice(self: Chunk, kv: torch.Tensor) -> None:
        meet(self, kv)
        meet(self, kv)

    monkeypatch.setattr(Chunk, "meet", twice)


def with_an_own_attention_that_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Chunk.attend_own

    def sees_all(self: Chunk) -> None:
        self._case = small(causal=False)
        own(self)

    monkeypatch.setattr(Chunk, "attend_own", sees_all)


def with_reads_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, of = MemorySpool.keep, Steps.of

    def late(self: MemorySpool, at_bytes: int, host: torch.Tensor) -> None:
        time.sleep(0.05)
        keep(self, at_bytes, host)

    def impatient(self: Steps, rows: Any, begun: Any = None) -> Any:
        for step in of(self, rows, begun):
            step.after = None
            yield step

    monkeypatch.setattr(MemorySpool, "keep", late)
    monkeypatch.setattr(Steps, "of", impatient)


def with_another_layers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "_kv_at", lambda self, layer, chunk: chunk.start * 2 * 16 * 4)


@pytest.mark.parametrize(
    "spoil",
    [without_a_meeting, with_a_meeting_twice, with_an_own_attention_that_sees_all, with_reads_that_do_not_wait,
     with_another_layers_keys],
)  # fmt: skip
def test_a_planted_fault_would_be_seen(spoil: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(seq_len=33, batch_size=1)
    want, made = exact(case), planned(case, 12, depth=5)
    assert torch.allclose(through(made).double(), want, atol=1e-5)
    spoil(monkeypatch)
    assert not torch.allclose(through(made).double(), want, atol=1e-3)


def test_every_write_tells_row_layer_and_chunk_in_order() -> None:
    case, trace = small(seq_len=20), Trace()
    through(planned(case, 8), watch=trace)
    steps = [event.span for event in trace.events if event.verb == "write"]
    assert all(isinstance(step, Step) for step in steps)
    told = [(step.row, step.layer, step.chunk) for step in steps if isinstance(step, Step) and step.does == "leave"]
    assert told == [(row, 1, Span(start, min(start + 8, 20))) for row in range(2) for start in (0, 8, 16)]
    assert str(steps[0]) == "row 0 layer 0 0-7 enter" and "row 1 layer 1 16-19 meet 8-15" in map(str, steps)


def test_rows_that_are_done_are_left_out() -> None:
    case = small(batch_size=4)
    whole, rest = through(planned(case, 8)), through(planned(case, 8), done_rows={0, 2})
    assert bool(rest[[0, 2]].isnan().all()) and torch.equal(rest[[1, 3]], whole[[1, 3]])


def test_a_second_pass_and_the_ceilings_run_on_the_same_spool() -> None:
    case = small()
    sink, source = MemorySink(case), SeededSource(case, 2)
    with Engine(planned(case, 8), seeded_state(case)) as engine:
        engine.run_pass(source, sink)
        first = sink.host_BSD.clone()
        assert engine.time_card() > 0 and engine.time_road(source, MemorySink(case)) > 0
        engine.run_pass(source, sink)
    source.close()
    assert torch.equal(sink.host_BSD, first)


@pytest.mark.parametrize("place", ["read", "fetch", "work", "keep", "write"])
@pytest.mark.parametrize("turn", [0, 3])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_failure_anywhere_comes_out_and_every_thread_ends(
    place: str, turn: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planted(Exception):
        pass

    owner: Any = {"read": SeededSource, "fetch": MemorySpool, "work": ChunkedRows, "keep": MemorySpool,
                  "write": MemorySink}[place]  # fmt: skip
    original, calls = getattr(owner, place), iter(range(10_000))

    def fails(*given: Any) -> Any:
        if next(calls) == turn:
            raise Planted
        return original(*given)

    monkeypatch.setattr(owner, place, fails)
    before = threading.active_count()
    with pytest.raises(Planted):
        through(planned(small(), 8, depth=depth))
    left = [t.name for t in threading.enumerate() if t.name.startswith(("frontier-", "spool"))]
    assert not left and threading.active_count() <= before + 6  # sources and sinks keep pools of their own


def test_an_event_is_told_for_each_verb_of_each_step() -> None:
    case, events = small(seq_len=20, batch_size=1), list[Event]()
    through(planned(case, 8), watch=events.append)
    num_steps = len(list(Steps(planned(case, 8), None).of([0])))
    assert len(events) == 5 * num_steps


def test_no_causal_call_is_other_than_square_and_no_call_is_longer_than_a_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = small()
    stack = pack(seeded_state(case), case, FLASH, torch.device("cpu"))
    chunk = Chunk(8, stack, case, FLASH, torch.device("cpu"))
    chunk.begin(torch.randn(8, 16), 0)
    q, k = (torch.randn(1, length, 2, 8) for length in (8, 5))
    chunk._attend(q, k, k, False)
    with pytest.raises(AssertionError):
        chunk._attend(q, k, k, True)
    monkeypatch.setattr(costs, "MOST_ELEMENTS", 3 * 16 * 7)
    with pytest.raises(AssertionError):
        Chunk(8, stack, case, FLASH, torch.device("cpu"))
