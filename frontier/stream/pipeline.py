"""The loop that carries spans through the five verbs, several at once, at any depth.

Takes    loads (spans of rows, or steps of a chunked row), slots, lanes, and callables for read, work and write.
Gives    everything written, or the first error, with all threads ended.
Knows nothing of cases, layers, files or what the numbers mean.
"""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from frontier.spans import Span
from frontier.stream.lanes import Lanes, Work
from frontier.stream.ring import Slot
from frontier.stream.trace import Event

Read = Callable[[Any, Tensor], None]
Write = Callable[[Any, Tensor, Tensor], None]
"""`write(load, pinned_out_BSD, pinned_note)`"""
Lend = Callable[[Any, Slot], Slot]
"""`lend(load, slot)`: the buffers that a load is carried in: the slot's, or others where it lies already."""


def lend_slot(load: Span, slot: Slot) -> Slot:
    """A slot's own buffers, shortened to what the load takes."""
    return slot.lent(load.up, load.down)


class _Trip(NamedTuple):
    """One load on its way, and the slot that it will have been read into."""

    load: Span
    read: Future[Slot]


class _Stopped(Exception):
    """A thread was asked to end because another one failed; never leaves this file."""


def stream(
    loads: Iterable[Span],
    slots: list[Slot],
    lanes: Lanes,
    *,
    read: Read,
    work: Work,
    write: Write,
    lend: Lend = lend_slot,
    watch: Callable[[Event], None] = lambda event: None,
    poison: bool = False,
) -> None:
    """Carry each load through read, upload, compute, download and write; return when all are written.

    Depth    is the number of slots; with one slot nothing overlaps, which is the debug mode.
    Order    loads are read, worked on and written in order, each verb on its own thread or lane; one that reads
             what another wrote says so by its `after`.
    Raises   whatever read, work or write raised first; later loads are not written.
    """
    free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)
    reader = ThreadPoolExecutor(1, "frontier-read")
    writer = ThreadPoolExecutor(1, "frontier-write")
    failed = False
    began_it: BaseException | None = None  # the first failure of any thread

    at_hand: deque[Slot] = deque()  # slots that the reader has taken and not yet filled
    taken = 0

    # No synchronisation besides this queue and the marks is needed: a slot is lent again only after its last
    # write ended, and by then its upload, compute and download have ended too. Writes end in order and each frees
    # one slot: so many as were taken beyond the ring's depth have ended.
    def read_one(load: Span) -> Slot:
        nonlocal taken
        while not at_hand or (load.after is not None and taken - len(slots) <= load.after):
            slot = None if failed else free.get()
            if slot is None or failed:
                raise _Stopped
            at_hand.append(slot)
            taken += 1
        slot = at_hand.popleft()
        if poison:
            slot.poison_host()
        began_s = time.perf_counter()
        read(load, slot.pinned_in_BSD[: load.up])
        watch(Event("read", load, began_s, time.perf_counter()))
        return slot

    def write_one(load: Span, slot: Slot, wait: Callable[[], list[Event]]) -> None:
        nonlocal failed, began_it
        try:
            events = wait()
            if failed:
                raise _Stopped
            for event in events:
                watch(event)
            began_s = time.perf_counter()
            write(load, slot.pinned_out_BSD[: load.down], slot.pinned_note)
            watch(Event("write", load, began_s, time.perf_counter()))
            free.put(slot)
        except BaseException as error:
            if not failed:
                began_it = error
            failed = True
            free.put(None)  # wakes a reader that waits for this slot
            raise

    carried: deque[Future[None]] = deque()  # writes not known to have ended
    started = (_Trip(load, reader.submit(read_one, load)) for load in loads)
    try:
        for trip in ahead(min(1, len(slots) - 1), started):
            slot = trip.read.result()
            mark = lanes.carry(trip.load, lend(trip.load, slot), work, poison)  # queues the work; does not wait for it
            carried.append(writer.submit(write_one, trip.load, slot, mark.wait))
            while carried and carried[0].done():
                carried.popleft().result()
        for written in carried:
            written.result()
    except BaseException as error:
        failed = True
        free.put(None)
        first = began_it or error  # a stopped thread only follows the failure of another
        if first is not error:
            raise first from None
        raise
    finally:
        free.put(None)
        writer.shutdown(wait=True, cancel_futures=failed)
        reader.shutdown(wait=True, cancel_futures=True)
        if failed:
            with contextlib.suppress(RuntimeError):  # a broken card repeats its error; the first one counts
                lanes.drain()


def ahead(extra: int, started: Iterable[_Trip]) -> Iterator[_Trip]:
    """Yield `started` in order, keeping up to `extra` later items already started."""
    waiting: deque[_Trip] = deque()
    for trip in started:
        waiting.append(trip)
        if len(waiting) > extra:
            yield waiting.popleft()
    yield from waiting
