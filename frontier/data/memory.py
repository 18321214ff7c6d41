"""Host memory: the bytes behind a tensor, and copies, fills and other work spread over threads.

Takes    tensors on the host, and a pool.
Gives    the same tensors, filled.
Knows nothing of files or of what the numbers mean.

Shapes   B rows, S positions, D width.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from frontier.case import Case
from frontier.spans import Span, cut
from frontier.units import MIB

PIECE_BYTES = 8 * MIB

Item = TypeVar("Item")


def spread(pool: Executor, work: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Do `work` on every item. When this returns or raises, none of it is still running.

    The caller must not be a thread of `pool` itself: it would wait for its own place.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        # Ctrl-C lands in the wait above: a thread left running would write into memory that is lent again.
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()


def assert_holds(host_BSD: Tensor, rows: Span, case: Case, positions: Span | None = None) -> None:
    """That a tensor handed to a source or sink can hold just these rows, or just these positions of one row."""
    assert 0 <= rows.start < rows.stop <= case.batch_size, (rows, case.batch_size)
    within = positions or Span(0, case.seq_len)
    assert 0 <= within.start < within.stop <= case.seq_len, (within, case.seq_len)
    assert len(rows) == 1 or positions is None, (rows, positions)
    assert host_BSD.shape == (len(rows), len(within), case.d_model), (tuple(host_BSD.shape), rows, positions)
    assert host_BSD.dtype == torch.float32 and host_BSD.device.type == "cpu" and host_BSD.is_contiguous()


def bytes_of(host: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, for reading into and writing from without a copy."""
    return host.view(-1).view(torch.uint8).numpy().data


def copy(pool: Executor, into: Tensor, source: Tensor) -> None:
    """Copy one contiguous float32 host tensor into another of its size, on all threads of the pool.

    NumPy, because torch's own copy takes its thread count from a process-wide setting, which torchrun sets to 1.
    """
    flat_into, flat_source = into.view(-1).numpy(), source.view(-1).numpy()

    def copy_piece(piece: Span) -> None:
        np.copyto(flat_into[piece.as_slice()], flat_source[piece.as_slice()])

    spread(pool, copy_piece, _pieces(into))


def poisoned(pool: Executor, *shape: int) -> Tensor:
    """New float32 host memory, every page touched and every value NaN, so that what is never written shows."""
    host = torch.empty(shape, dtype=torch.float32)
    flat = host.view(-1).numpy()
    spread(pool, lambda piece: flat[piece.as_slice()].fill(np.nan), _pieces(host))
    return host


def _pieces(host: Tensor) -> Iterable[Span]:
    return cut(host.numel(), PIECE_BYTES // host.element_size())
