"""Stand-ins for the tests of this room: lanes that are late, lanes that cheat, and a count of lent slots."""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from frontier.spans import Span, cut
from frontier.stream.lanes import HostLanes, Lanes, Mark, Work
from frontier.stream.pipeline import stream
from frontier.stream.ring import Slot, make_ring
from frontier.stream.trace import Event, Trace, Verb

MakeLanes = Callable[..., Lanes]
POSITIONS, WIDTH = 2, 3
ROWS_PER_SLICE = 4


class DelayedLanes:
    """Three threads that overlap as three CUDA streams do: `carry` returns at once, all three verbs land late.

    `skip` leaves verbs out; `waits` false gives marks that do not wait.
    """

    def __init__(self, delay_s: float = 0.001, skip: Iterable[Verb] = (), waits: bool = True) -> None:
        self.lanes = {verb: ThreadPoolExecutor(1, f"late-{verb}") for verb in ("upload", "compute", "download")}
        self.delay_s, self.skip, self.waits = delay_s, set(skip), waits
        self.most_at_once, self._running, self._lock = 0, 0, threading.Lock()
        self._last: Future[list[Event]] | None = None

    def carry(self, span: Span, slot: Slot, work: Work, poison: bool) -> Mark:
        rows = slice(0, len(span))

        def upload() -> None:
            if poison:
                slot.poison_device()
            if "upload" not in self.skip:
                slot.device_in_BSD[rows].copy_(slot.pinned_in_BSD[rows])

        def compute() -> None:
            if "compute" not in self.skip:
                work(span, slot.device_in_BSD[rows], slot.device_out_BSD[rows], slot.device_note)

        def download() -> None:
            if "download" not in self.skip:
                slot.pinned_out_BSD[rows].copy_(slot.device_out_BSD[rows])
                slot.pinned_note.copy_(slot.device_note)

        before: Future[list[Event]] | None = None
        for verb, do in (("upload", upload), ("compute", compute), ("download", download)):
            before = self.lanes[verb].submit(self._after, before, verb, span, do)
        self._last = before
        assert before is not None
        return _Late(before if self.waits else None)

    def _after(self, before: Future[list[Event]] | None, verb: Verb, span: Span, do: Callable[[], None]) -> list[Event]:
        events = before.result() if before is not None else []
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        began_s = time.perf_counter()
        try:
            time.sleep(self.delay_s)
            do()
        finally:
            with self._lock:
                self._running -= 1
        return [*events, Event(verb, span, began_s, time.perf_counter())]

    def drain(self) -> None:
        if self._last is not None:
            self._last.exception()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.shutdown(wait=True)


class _Late:
    def __init__(self, landed: Future[list[Event]] | None) -> None:
        self._landed = landed

    def wait(self) -> list[Event]:
        return self._landed.result() if self._landed is not None else []


class CheatingHostLanes(HostLanes):
    """Host lanes that leave one verb out."""

    def __init__(self, skip: Verb) -> None:
        self.skip = skip

    def carry(self, span: Span, slot: Slot, work: Work, poison: bool) -> Mark:
        rows = slice(0, len(span))
        if poison:
            slot.poison_device()
        if self.skip != "upload":
            slot.device_in_BSD[rows].copy_(slot.pinned_in_BSD[rows])
        if self.skip != "compute":
            work(span, slot.device_in_BSD[rows], slot.device_out_BSD[rows], slot.device_note)
        if self.skip != "download":
            slot.pinned_out_BSD[rows].copy_(slot.device_out_BSD[rows])
            slot.pinned_note.copy_(slot.device_note)
        return _Late(None)


class Journey:
    """One run of the loop over numbered rows: what was read, worked on and written, and which slots were out.

    `fail` maps (verb, turn) to the error that verb raises at that turn.
    """

    def __init__(self, fail: dict[tuple[str, int], BaseException] | None = None, slow_write_s: float = 0.0) -> None:
        self.fail, self.slow_write_s = fail or {}, slow_write_s
        self.seen: dict[str, list[Span]] = {"read": [], "work": [], "write": []}
        self.written: list[Tensor] = []
        self.notes: list[Tensor] = []
        self.lent: set[int] = set()
        self.lent_twice: list[Span] = []
        self.trace = Trace()

    def _at(self, verb: str, span: Span) -> None:
        turn = len(self.seen[verb])
        self.seen[verb].append(span)
        if (verb, turn) in self.fail:
            raise self.fail[verb, turn]

    def read(self, span: Span, pinned_in_BSD: Tensor) -> None:
        self._at("read", span)
        if pinned_in_BSD.data_ptr() in self.lent:
            self.lent_twice.append(span)
        self.lent.add(pinned_in_BSD.data_ptr())
        pinned_in_BSD.copy_(rows(span))

    def work(self, span: Span, device_in_BSD: Tensor, device_out_BSD: Tensor, device_note: Tensor) -> None:
        self._at("work", span)
        torch.add(device_in_BSD * 2, 1, out=device_out_BSD)
        device_note.fill_(float(span.start))

    def write(self, span: Span, pinned_out_BSD: Tensor, pinned_note: Tensor) -> None:
        time.sleep(self.slow_write_s)
        self._at("write", span)
        self.written.append(pinned_out_BSD.clone())
        self.notes.append(pinned_note.clone())
        for slot in self.slots:
            if slot.pinned_out_BSD.data_ptr() == pinned_out_BSD.data_ptr():
                self.lent.discard(slot.pinned_in_BSD.data_ptr())

    def go(self, lanes: Lanes, depth: int, total: int = 26, slots: list[Slot] | None = None, **options: Any) -> None:
        shape = (ROWS_PER_SLICE, POSITIONS, WIDTH)
        self.slots = make_ring(depth, shape, torch.device("cpu")) if slots is None else slots
        stream(
            cut(total, ROWS_PER_SLICE), self.slots, lanes,
            read=self.read, work=self.work, write=self.write, watch=self.trace, **options,
        )  # fmt: skip

    @property
    def output(self) -> Tensor:
        return torch.cat(self.written) if self.written else torch.empty(0, POSITIONS, WIDTH)


def rows(span: Span) -> Tensor:
    """Rows that tell their number, position and channel."""
    place_SD = torch.arange(POSITIONS * WIDTH, dtype=torch.float32).view(1, POSITIONS, WIDTH)
    return torch.arange(span.start, span.stop, dtype=torch.float32).view(-1, 1, 1) * 100 + place_SD


def expected(total: int) -> Tensor:
    return rows(Span(0, total)) * 2 + 1


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("frontier-")]
