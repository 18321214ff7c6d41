"""The loop: everything is written, in order, at any depth; the first error comes out and nothing hangs."""

import threading
import time

import pytest
import torch
from river import ROWS_PER_SLICE, DelayedLanes, Journey, MakeLanes, expected, our_threads

from frontier.spans import Span, cut
from frontier.stream.lanes import HostLanes, Lanes
from frontier.stream.pipeline import ahead, stream
from frontier.stream.ring import make_ring
from frontier.stream.trace import VERBS

pytestmark = pytest.mark.timeout(20)
DEPTHS = [1, 2, 3, 5]
NUM_SLICES = 7  # of 26 rows by 4: the last has 2


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("total", [1, 3, 4, 5, 26])
def test_every_row_is_written_once_and_in_order(lanes: Lanes, depth: int, total: int) -> None:
    journey = Journey()
    journey.go(lanes, depth, total)
    spans = list(cut(total, ROWS_PER_SLICE))
    assert journey.seen == {"read": spans, "work": spans, "write": spans}
    assert torch.equal(journey.output, expected(total))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_short_last_slice_is_written_whole_and_no_longer(lanes: Lanes, depth: int) -> None:
    journey = Journey()
    journey.go(lanes, depth, 26)
    assert [len(slice_BSD) for slice_BSD in journey.written] == [4] * 6 + [2]
    assert torch.equal(journey.written[-1], expected(26)[24:])


def test_a_swapped_pair_of_slices_would_be_seen(lanes: Lanes) -> None:
    journey = Journey()
    journey.go(lanes, 3)
    journey.written[1], journey.written[2] = journey.written[2], journey.written[1]
    assert not torch.equal(journey.output, expected(26))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_note_arrives_with_its_own_slice(lanes: Lanes, depth: int) -> None:
    journey = Journey(slow_write_s=0.001)
    journey.go(lanes, depth)
    assert [note.tolist() for note in journey.notes] == [[float(span.start)] * 4 for span in journey.seen["write"]]


def test_no_spans_write_nothing_and_end(lanes: Lanes) -> None:
    journey = Journey()
    journey.go(lanes, 2, total=0)
    assert not journey.written and not our_threads()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("slow_write_s", [0.0, 0.003])
def test_no_slot_is_lent_twice_at_once(lanes: Lanes, depth: int, slow_write_s: float) -> None:
    journey = Journey(slow_write_s=slow_write_s)
    journey.go(lanes, depth)
    assert journey.lent_twice == [] and journey.lent == set()


def test_a_slot_that_is_lent_twice_would_be_seen(delayed: MakeLanes) -> None:
    (slot,) = make_ring(1, (ROWS_PER_SLICE, 2, 3), torch.device("cpu"))
    journey = Journey(slow_write_s=0.003)
    journey.go(delayed(delay_s=0.002), 2, slots=[slot, slot])
    assert journey.lent_twice


def test_deep_rings_overlap_the_verbs_and_one_slot_does_not() -> None:
    most = {}
    for depth in (1, 3):
        late = DelayedLanes(delay_s=0.005)
        Journey().go(late, depth)
        late.close()
        most[depth] = late.most_at_once
    assert most[1] == 1
    assert most[3] > 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("turn", [0, 3, NUM_SLICES - 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("verb", ["read", "work", "write"])
def test_a_failure_comes_out_as_itself_and_all_threads_end(lanes: Lanes, verb: str, turn: int, depth: int) -> None:
    planted = ZeroDivisionError(f"{verb} {turn}")
    journey = Journey(fail={(verb, turn): planted})
    with pytest.raises(ZeroDivisionError) as caught:
        journey.go(lanes, depth)
    assert caught.value is planted
    assert our_threads() == []
    whole = len(journey.written)
    assert whole <= turn, "a slice was written after the one that failed"
    assert torch.equal(journey.output, expected(26)[: whole * ROWS_PER_SLICE])


def test_without_a_failure_the_same_journey_raises_nothing(lanes: Lanes) -> None:
    Journey(fail={("read", NUM_SLICES): ZeroDivisionError()}).go(lanes, 3)
    assert our_threads() == []


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("verb", ["read", "work", "write"])
def test_an_interrupt_ends_the_stream_as_itself(lanes: Lanes, verb: str, kind: type[BaseException], depth: int) -> None:
    with pytest.raises(kind):
        Journey(fail={(verb, 2): kind()}).go(lanes, depth)
    assert our_threads() == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_listener_or_a_list_of_spans_that_fails_comes_out_too(lanes: Lanes, depth: int) -> None:
    def spans():  # type: ignore[no-untyped-def]
        yield Span(0, 4)
        raise LookupError("spans")

    journey = Journey()
    slots = make_ring(depth, (4, 2, 3), torch.device("cpu"))
    journey.slots = slots
    parts = {"read": journey.read, "work": journey.work, "write": journey.write}
    with pytest.raises(LookupError, match="spans"):
        stream(spans(), slots, lanes, **parts)
    for verb in VERBS:

        def watch(event: object, verb: str = verb) -> None:
            if event.verb == verb:  # type: ignore[attr-defined]
                raise LookupError(verb)

        with pytest.raises(LookupError, match=verb):
            stream(cut(26, 4), slots, lanes, **parts, watch=watch)
        assert our_threads() == []


def test_the_first_of_two_failures_is_the_one_reported() -> None:
    """The write of slice 0 fails while slice 1 is at work, whose own failure comes later."""
    write_failed = threading.Event()
    journey = Journey()

    def work(span: Span, *buffers: torch.Tensor) -> None:
        if span.start:
            assert write_failed.wait(5)
            time.sleep(0.02)
            raise LookupError("the second failure")
        journey.work(span, *buffers)

    def write(span: Span, *buffers: torch.Tensor) -> None:
        write_failed.set()
        raise ZeroDivisionError("the first failure")

    slots = make_ring(3, (4, 2, 3), torch.device("cpu"))
    with pytest.raises(ZeroDivisionError, match="the first failure"):
        stream(cut(26, 4), slots, HostLanes(), read=journey.read, work=work, write=write)


@pytest.mark.parametrize("depth", DEPTHS)
def test_slots_serve_again_after_a_failure(lanes: Lanes, depth: int) -> None:
    slots = make_ring(depth, (ROWS_PER_SLICE, 2, 3), torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        Journey(fail={("work", 2): ZeroDivisionError()}).go(lanes, depth, slots=slots)
    journey = Journey()
    journey.go(lanes, depth, slots=slots, poison=True)
    assert torch.equal(journey.output, expected(26))


def test_ahead_starts_as_many_early_as_it_is_told_and_keeps_the_order() -> None:
    for extra in (0, 1, 3):
        started: list[int] = []
        items = (started.append(turn) or turn for turn in range(5))
        lead = []
        for item in ahead(extra, items):  # type: ignore[arg-type,type-var]
            lead.append(len(started) - 1 - item)  # type: ignore[operator]
        assert lead == [min(extra, 4 - turn) for turn in range(5)]
