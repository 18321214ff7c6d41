"""A whole input in host memory, read once ahead of the run.

Takes    any source.
Gives    the same rows, at the speed of a copy.
Knows nothing of where they came from.

Shapes   B rows, S positions, D width.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.data.memory import assert_holds, copy
from frontier.data.protocols import Source
from frontier.spans import Span


class ResidentSource:
    """Reads all rows of `source` when made; closing it closes `source`."""

    def __init__(self, source: Source, case: Case, threads: int) -> None:
        self._source = source
        self._case = case
        self._host_BSD = torch.empty((case.batch_size, case.seq_len, case.d_model), dtype=torch.float32)
        source.read(Span(0, case.batch_size), self._host_BSD)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="resident")

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        assert_holds(into_BSD, rows, self._case, positions)
        within = positions or Span(0, self._case.seq_len)
        copy(self._pool, into_BSD, self._host_BSD[rows.as_slice(), within.as_slice()])

    def describe(self) -> dict[str, Any]:
        return self._source.describe()

    def close(self) -> None:
        self._pool.shutdown()
        self._source.close()
