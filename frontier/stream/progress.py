"""Listens to writes and tells people how far a run is: a bar on a terminal, a plain line now and then elsewhere.

Takes    events.
Gives    text on stderr.
Knows nothing of what the rows are.
"""

import sys
import time

from tqdm import tqdm

from frontier.stream.trace import Event
from frontier.units import show_bytes, show_seconds

LINE_EVERY_S = 10.0


class Progress:
    """Rows done of `total_rows`, rate, time left, bytes. Silent when `quiet`.

    Of chunked rows every step counts by the positions that it brings, as its time does: `unit` names them, and a
    `row_bytes` of 0 leaves the bytes out.
    """

    def __init__(self, total_rows: int, row_bytes: int, quiet: bool = False, unit: str = "row") -> None:
        self._total_rows, self._row_bytes, self._unit = total_rows, row_bytes, unit
        self._rows_done = 0
        self._began_s = self._last_line_s = time.perf_counter()
        self._quiet = quiet
        self._bar = None
        if not quiet and sys.stderr.isatty():
            self._bar = tqdm(total=total_rows, unit=unit, file=sys.stderr, dynamic_ncols=True, smoothing=0.1)

    def __call__(self, event: Event) -> None:
        if event.verb == "write":
            self.add(len(event.span))

    def add(self, num_rows: int) -> None:
        """So many more are done."""
        if self._quiet:
            return
        self._rows_done += num_rows
        done = f"{show_bytes(self._rows_done * self._row_bytes)} out" if self._row_bytes else ""
        if self._bar is not None:
            self._bar.set_postfix_str(done, refresh=False)
            self._bar.update(num_rows)
            return
        now_s = time.perf_counter()
        finished = self._rows_done >= self._total_rows
        if now_s - self._last_line_s >= LINE_EVERY_S or (finished and now_s - self._began_s >= LINE_EVERY_S):
            self._last_line_s = now_s
            rate = self._rows_done / (now_s - self._began_s)
            left = show_seconds((self._total_rows - self._rows_done) / rate)
            print(
                f"{self._rows_done} of {self._total_rows} {self._unit}s, {rate:.3g} {self._unit}s/s, "
                f"{done}{', ' * bool(done)}{left} left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
