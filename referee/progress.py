"""How far a long judgement has come: a bar on a terminal, a plain line now and then elsewhere.

Takes    amounts of work as they are done, from any thread.
Gives    words on stderr, or nothing at all.
Knows nothing of what the work is.
"""

from __future__ import annotations

import sys
import threading
import time

LINE_EVERY_S = 30.0


class Progress:
    """Says things, and counts work up to a total once that is known."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._lock, self._bar = quiet, threading.Lock(), None
        self.start(1.0)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def start(self, total: float) -> None:
        self._total, self._done, self._begun_s = total, 0.0, time.monotonic()
        self._line_s = self._begun_s
        if total > 1 and not self._quiet and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="FLOP", unit_scale=True, smoothing=0.05, file=sys.stderr, leave=False)

    def tick(self, amount: float) -> None:
        with self._lock:
            self._done += amount
            now_s = time.monotonic()
            if self._bar is not None:
                self._bar.update(amount)
            elif not self._quiet and now_s - self._line_s >= LINE_EVERY_S:
                self._line_s, share = now_s, min(1.0, self._done / self._total)
                self.say(f"{share:.0%} done, about {(now_s - self._begun_s) * (1 / share - 1):,.0f} s left")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
