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


class Trace:
    """Keeps every event of a run, in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def busy_s(self) -> dict[str, float]:
        """Seconds each verb was at work, by the union of its events."""
        return {verb: _union_s([e for e in self.events if e.verb == verb]) for verb in VERBS}

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


def _union_s(events: list[Event]) -> float:
    total_s, reached_s = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.began_s):
        total_s += max(0.0, event.ended_s - max(reached_s, event.began_s))
        reached_s = max(reached_s, event.ended_s)
    return total_s
