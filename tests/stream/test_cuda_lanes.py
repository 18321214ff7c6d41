"""The CUDA lanes without CUDA: a stand-in records what each lane was asked, so that CI sees a lost wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from frontier.spans import Span
from frontier.stream import lanes as lanes_module
from frontier.stream.lanes import CudaLanes
from frontier.stream.ring import make_ring

LANES = ("upload", "compute", "download")


class FakeEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.lane: FakeStream | None = None

    def record(self, lane: "FakeStream") -> None:
        self.lane = lane
        lane.asked.append(("record", self))

    def synchronize(self) -> None:
        assert self.lane is not None
        self.lane.asked.append(("host waits", self))

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 5.0


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.asked: list[tuple[str, Any]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.asked.append(("wait", event))


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> CudaLanes:
    @contextmanager
    def current(lane: FakeStream) -> Iterator[None]:
        lane.asked.append(("enter", None))
        yield

    lanes_module._streams.cache_clear()
    for name, fake in (("Event", FakeEvent), ("Stream", FakeStream), ("stream", current)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made = CudaLanes(torch.device("cpu"))
    lanes_module._streams.cache_clear()
    for name in LANES:
        getattr(made, name).asked.clear()
    return made


def carry(lanes: CudaLanes, poison: bool = False) -> tuple[Any, Any]:
    slot = make_ring(1, (2, 3, 4), torch.device("cpu"))[0]
    slot.pinned_in_BSD.fill_(7.0)

    def work(rows: Span, device_in: torch.Tensor, device_out: torch.Tensor, note: torch.Tensor) -> None:
        device_out.copy_(device_in * 2)
        note.fill_(1.0)

    return slot, lanes.carry(Span(4, 6), slot, work, poison)


def waits(lanes: CudaLanes, name: str) -> list[FakeEvent]:
    return [event for what, event in getattr(lanes, name).asked if what == "wait"]


def last_record(lanes: CudaLanes, name: str) -> FakeEvent:
    return [event for what, event in getattr(lanes, name).asked if what == "record"][-1]


def orders_are_kept(lanes: CudaLanes) -> bool:
    """Compute waits for what upload recorded last, download for what compute recorded last."""
    return waits(lanes, "compute") == [last_record(lanes, "upload")] and waits(lanes, "download") == [
        last_record(lanes, "compute")
    ]


@pytest.mark.parametrize("poison", [False, True])
def test_each_lane_waits_for_the_end_of_the_one_before(lanes: CudaLanes, poison: bool) -> None:
    slot, _ = carry(lanes, poison)
    assert orders_are_kept(lanes)
    assert bool((slot.pinned_out_BSD == 14.0).all()) and bool((slot.pinned_note == 1.0).all())


@pytest.mark.parametrize("deaf", ["compute", "download"])
def test_a_lane_that_does_not_wait_would_be_seen(lanes: CudaLanes, deaf: str) -> None:
    getattr(lanes, deaf).wait_event = lambda event: None
    carry(lanes)
    assert not orders_are_kept(lanes)


def test_a_lane_waits_before_it_begins(lanes: CudaLanes) -> None:
    carry(lanes)
    for name in ("compute", "download"):
        assert [what for what, _ in getattr(lanes, name).asked][:2] == ["wait", "enter"]


def test_the_mark_waits_for_the_end_of_the_download_and_tells_three_verbs(lanes: CudaLanes) -> None:
    _, mark = carry(lanes)
    assert not any(what == "host waits" for name in LANES for what, _ in getattr(lanes, name).asked)
    events = mark.wait()
    assert ("host waits", last_record(lanes, "download")) in lanes.download.asked  # type: ignore[attr-defined]
    assert [event.verb for event in events] == list(LANES)
    assert {event.span for event in events} == {Span(4, 6)}
