"""Listens to events: totals per verb, and a Chrome trace that opens in Perfetto.

Takes    events, from any thread.
Gives    seconds busy per verb; a JSON file.
Knows nothing of lanes or slots.
"""

import json
import threading
from pathlib import Path
from typing import Literal, NamedTuple

from frontier.spans import Span

Verb = Literal["read", "upload", "compute", "download", "write"]
VERBS: tuple[Verb, ...] = ("read", "upload", "compute", "download", "write")


class Event(NamedTuple):
    """One verb on one span: when it began and ended, in seconds of `time.perf_counter`."""

    verb: Verb
    span: Span
    began_s: float
    ended_s: float


# Of a trace that keeps the latest alone: some 200 KiB.
MOST_EVENTS = 1024


class Busy(NamedTuple):
    """Seconds of a verb's events up to a moment, counted once where several overlap."""

    total_s: float = 0.0
    reached_s: float = float("-inf")

    def and_then(self, event: Event) -> "Busy":
        """With one that begins no earlier than those before it."""
        added_s = max(0.0, event.ended_s - max(self.reached_s, event.began_s))
        return Busy(self.total_s + added_s, max(self.reached_s, event.ended_s))


class Trace:
    """Keeps every event of a run, in order of arrival; or, to add them up, the latest alone.

    `keeps`   all, for `save`: a run of millions of steps would hold a gigabyte of them
    """

    def __init__(self, keeps: bool = True) -> None:
        self._keeps, self._lock = keeps, threading.Lock()
        self.events: list[Event] = []
        self._busy = {verb: Busy() for verb in VERBS}

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)
            if not self._keeps and len(self.events) >= MOST_EVENTS:
                # Events arrive nearly in order of their beginnings: what the younger half overlaps is yet to come.
                self.events.sort(key=lambda event: event.began_s)
                self._busy = self._with(self.events[: MOST_EVENTS // 2])
                del self.events[: MOST_EVENTS // 2]

    def busy_s(self) -> dict[str, float]:
        """Seconds each verb was at work, by the union of its events."""
        with self._lock:
            return {verb: busy.total_s for verb, busy in self._with(self.events).items()}

    def _with(self, events: list[Event]) -> "dict[Verb, Busy]":
        busy = dict(self._busy)
        for event in sorted(events, key=lambda event: event.began_s):
            busy[event.verb] = busy[event.verb].and_then(event)
        return busy

    def save(self, path: Path) -> None:
        """Write the Chrome trace event format: one track a verb, complete events in microseconds."""
        start_s = min((event.began_s for event in self.events), default=0.0)
        tracks = [
            {"ph": "M", "pid": 0, "tid": turn, "name": "thread_name", "args": {"name": verb}}
            for turn, verb in enumerate(VERBS)
        ]
        spans = [
            {
                "ph": "X",
                "pid": 0,
                "tid": VERBS.index(event.verb),
                "name": f"{event.verb} {event.span}",
                "ts": (event.began_s - start_s) * 1e6,
                "dur": (event.ended_s - event.began_s) * 1e6,
                "args": {"start": event.span.start, "stop": event.span.stop},
            }
            for event in sorted(self.events, key=lambda event: event.began_s)
        ]
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps({"traceEvents": tracks + spans, "displayTimeUnit": "ms"}))
        partial.replace(path)
