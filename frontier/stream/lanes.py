"""The three CUDA lanes, and a host stand-in with the same methods for machines without a card.

Takes    a trip whose input has been read, and the work.
Gives    a mark to wait for, after which the output lies on the host.
Knows nothing of reading, writing or what the work computes.
"""

import functools
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from frontier.spans import Span
from frontier.stream.ring import Slot
from frontier.stream.trace import Event, Verb

Work = Callable[[Any, Tensor, Tensor, Tensor], None]
"""`work(span, device_in_BSD, device_out_BSD, device_note)`: fills the last two on the current lane."""

_VERBS: tuple[Verb, ...] = ("upload", "compute", "download")


class Mark(Protocol):
    """A point in a trip's life on the device."""

    def wait(self) -> list[Event]:
        """Block until the output has landed on the host; tell when each verb began and ended."""


class Lanes(Protocol):
    def carry(self, span: Span, slot: Slot, work: Work, poison: bool) -> Mark:
        """Start one slice's upload, compute and download; return a mark to wait for."""

    def drain(self) -> None:
        """Block until nothing that was started still runs."""


class HostLanes:
    """The same three verbs, done at once on the CPU."""

    def carry(self, span: Span, slot: Slot, work: Work, poison: bool) -> Mark:
        rows = slice(0, len(span))
        if poison:
            slot.poison_device()
        times_s = [time.perf_counter()]
        slot.device_in_BSD[rows].copy_(slot.pinned_in_BSD[rows])
        times_s.append(time.perf_counter())
        work(span, slot.device_in_BSD[rows], slot.device_out_BSD[rows], slot.device_note)
        times_s.append(time.perf_counter())
        slot.pinned_out_BSD[rows].copy_(slot.device_out_BSD[rows])
        slot.pinned_note.copy_(slot.device_note)
        times_s.append(time.perf_counter())
        return _Landed([Event(*fact) for fact in zip(_VERBS, repeat(span), times_s, times_s[1:], strict=False)])

    def drain(self) -> None:
        pass


class _Landed(NamedTuple):
    events: list[Event]

    def wait(self) -> list[Event]:
        return self.events


class CudaLanes:
    """Three CUDA streams: copies in, works and copies out overlap across slots."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.upload, self.compute, self.download = _streams(device)
        torch.cuda.synchronize(device)
        # Marks of the card are placed on the host's clock by one pair of readings.
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self.compute)
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def carry(self, span: Span, slot: Slot, work: Work, poison: bool) -> Mark:
        rows = slice(0, len(span))
        with torch.cuda.stream(self.upload):
            if poison:
                slot.poison_device()
            began_up = self._mark(self.upload)
            slot.device_in_BSD[rows].copy_(slot.pinned_in_BSD[rows], non_blocking=True)
            ended_up = self._mark(self.upload)
        self.compute.wait_event(ended_up)
        with torch.cuda.stream(self.compute):
            began_work = self._mark(self.compute)
            work(span, slot.device_in_BSD[rows], slot.device_out_BSD[rows], slot.device_note)
            ended_work = self._mark(self.compute)
        self.download.wait_event(ended_work)
        with torch.cuda.stream(self.download):
            began_down = self._mark(self.download)
            slot.pinned_out_BSD[rows].copy_(slot.device_out_BSD[rows], non_blocking=True)
            slot.pinned_note.copy_(slot.device_note, non_blocking=True)
            ended_down = self._mark(self.download)
        marks = [(began_up, ended_up), (began_work, ended_work), (began_down, ended_down)]
        return _CudaMark(span, self._base, self._base_s, marks)

    def drain(self) -> None:
        torch.cuda.synchronize(self._device)

    def _mark(self, lane: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking marks let the writer thread sleep: a spinning wait would take a core from the reader.
        mark = torch.cuda.Event(enable_timing=True, blocking=True)
        mark.record(lane)
        return mark


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    # One set a process: cuBLAS keeps a workspace of 32 MiB for every stream it ever saw.
    return tuple(torch.cuda.Stream(device) for _ in range(3))


class _CudaMark:
    def __init__(
        self, span: Span, base: torch.cuda.Event, base_s: float, marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        self._span, self._base, self._base_s, self._marks = span, base, base_s, marks

    def wait(self) -> list[Event]:
        self._marks[-1][1].synchronize()
        return [
            Event(verb, self._span, self._seconds(began), self._seconds(ended))
            for verb, (began, ended) in zip(_VERBS, self._marks, strict=True)
        ]

    def _seconds(self, mark: torch.cuda.Event) -> float:
        return self._base_s + float(self._base.elapsed_time(mark)) / 1e3
