"""Events tell all five verbs of each span; the trace adds them up and opens in Perfetto."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from river import ROWS_PER_SLICE, Journey

from frontier.spans import Span, cut
from frontier.stream.lanes import Lanes
from frontier.stream.trace import VERBS, Event, Trace

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_each_span_has_all_five_verbs_once_and_in_their_order(lanes: Lanes, depth: int) -> None:
    journey = Journey()
    journey.go(lanes, depth)
    spans = list(cut(26, ROWS_PER_SLICE))
    told = Counter((event.span, event.verb) for event in journey.trace.events)
    assert told == Counter((span, verb) for span in spans for verb in VERBS)
    for span in spans:
        times = {event.verb: event for event in journey.trace.events if event.span == span}
        for verb, after in pairwise(VERBS):
            assert times[verb].began_s <= times[verb].ended_s <= times[after].began_s


def test_a_verb_of_two_spans_never_overlaps_itself(lanes: Lanes) -> None:
    journey = Journey(slow_write_s=0.001)
    journey.go(lanes, 3)
    for verb in VERBS:
        ours = [event for event in journey.trace.events if event.verb == verb]
        assert all(a.ended_s <= b.began_s for a, b in pairwise(ours)), verb


def test_with_one_slot_nothing_overlaps(lanes: Lanes) -> None:
    journey = Journey()
    journey.go(lanes, 1)
    events = sorted(journey.trace.events, key=lambda event: event.began_s)
    assert all(a.ended_s <= b.began_s for a, b in pairwise(events))


def event(verb: str, began_s: float, ended_s: float) -> Event:
    return Event(verb, Span(0, 1), began_s, ended_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "busy_s"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (5, 6)], 3),
        ([(1, 3), (2, 6)], 5),
        ([(1, 9), (2, 3)], 8),
        ([(2, 3), (1, 9)], 8),
        ([(1, 2), (2, 3)], 2),
        ([(1, 3), (1, 3)], 2),
    ],
)
def test_busy_seconds_count_no_moment_twice(times: list[tuple[float, float]], busy_s: float) -> None:
    trace = Trace()
    for began_s, ended_s in times:
        trace(event("read", began_s, ended_s))
        trace(event("write", 0, 100))  # another verb's time is its own
    assert trace.busy_s()["read"] == busy_s
    assert trace.busy_s()["compute"] == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12))))
def test_busy_seconds_are_the_moments_in_any_event(times: list[tuple[int, int]]) -> None:
    trace = Trace()
    for began_s, lasted_s in times:
        trace(event("compute", began_s, began_s + lasted_s))
    moments = {moment for began_s, lasted_s in times for moment in range(began_s, began_s + lasted_s)}
    assert trace.busy_s()["compute"] == len(moments)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=300), st.integers(1, 4))
def test_a_trace_that_keeps_the_latest_alone_adds_up_the_same(gaps: list[tuple[int, int]], late: int) -> None:
    """Events that last up to 30 moments and arrive up to four places late, through a trace of 64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frontier.stream.trace.MOST_EVENTS", 64)
        whole, latest, began_s, held = Trace(), Trace(keeps=False), 0, []
        for turn, (gap_s, lasted_s) in enumerate(gaps):
            began_s += gap_s
            held.append(event(VERBS[turn % 2], began_s, began_s + lasted_s))
            if len(held) > late:
                for trace in (whole, latest):
                    trace(held[-1])
                    trace(held[0])
                held = held[1:-1]
            assert len(latest.events) < 64
        assert latest.busy_s() == whole.busy_s()


def test_the_chrome_trace_is_well_formed(lanes: Lanes, tmp_path: Path) -> None:
    journey = Journey()
    journey.go(lanes, 3)
    journey.trace.save(tmp_path / "trace.json")
    assert_well_formed(json.loads((tmp_path / "trace.json").read_text()), num_spans=7)


def test_an_empty_trace_still_loads(tmp_path: Path) -> None:
    Trace().save(tmp_path / "trace.json")
    assert_well_formed(json.loads((tmp_path / "trace.json").read_text()), num_spans=0)


@pytest.mark.parametrize("fault", ["lost", "negative", "track"])
def test_a_chrome_trace_with_a_fault_would_be_seen(lanes: Lanes, tmp_path: Path, fault: str) -> None:
    journey = Journey()
    journey.go(lanes, 3)
    if fault == "lost":
        journey.trace.events.pop()
    if fault == "negative":
        journey.trace.events[0] = journey.trace.events[0]._replace(ended_s=0.0)
    journey.trace.save(tmp_path / "trace.json")
    table = json.loads((tmp_path / "trace.json").read_text())
    if fault == "track":
        table["traceEvents"][-1]["tid"] = 9
    with pytest.raises(AssertionError):
        assert_well_formed(table, num_spans=7)


def assert_well_formed(table: dict, num_spans: int) -> None:
    """Metadata names five tracks; complete events have times in microseconds, from zero, on those tracks."""
    named = {e["tid"]: e["args"]["name"] for e in table["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    assert tuple(named[tid] for tid in sorted(named)) == VERBS
    complete = [e for e in table["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == num_spans * len(VERBS)
    assert len(complete) + len(named) == len(table["traceEvents"])
    for told in complete:
        assert told["ts"] >= 0 and told["dur"] >= 0 and told["pid"] == 0 and told["tid"] in named
        assert told["name"] == f"{named[told['tid']]} {told['args']['start']}-{told['args']['stop'] - 1}"
    if complete:
        assert min(e["ts"] for e in complete) == 0
        assert max(e["ts"] + e["dur"] for e in complete) < 60e6, "microseconds, not nanoseconds"
