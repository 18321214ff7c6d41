"""Makes any part of any row from (seed, row, block), so that inputs never depend on how they are cut.

Takes    a case's seed, and which rows are wanted.
Gives    standard normal rows times the case's input scale (contract section 4).
Knows nothing of slices, plans or ranks.

Shapes   B rows, S positions, D width.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier.case import Case
from frontier.data.memory import assert_holds, spread
from frontier.spans import Span, cut
from frontier.units import MIB

BLOCK_POSITIONS = 4096
# Short rows share a task: a future costs about as much as drawing 16 KiB.
TASK_BYTES = MIB


class SeededSource:
    """A case's seeded rows, drawn in parallel straight into the caller's memory."""

    def __init__(self, case: Case, threads: int) -> None:
        self._case = case
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        case = self._case
        assert_holds(into_BSD, rows, case, positions)
        within = positions or Span(0, case.seq_len)
        blocks = [
            (number, block)
            for number, block in enumerate(cut(case.seq_len, BLOCK_POSITIONS))
            if block.start < within.stop and within.start < block.stop
        ]

        def fill_blocks(task: Span) -> None:
            for turn in range(task.start, task.stop):
                row, (number, block) = turn // len(blocks), blocks[turn % len(blocks)]
                wanted = Span(max(block.start, within.start), min(block.stop, within.stop))
                into_SD = into_BSD[row, wanted.start - within.start : wanted.stop - within.start]
                if wanted == block:
                    fill_block(case, rows.start + row, number, into_SD)
                else:  # a block is drawn whole or not at all: its values depend on its length
                    whole_SD = torch.empty(len(block), case.d_model)
                    fill_block(case, rows.start + row, number, whole_SD)
                    into_SD.numpy()[:] = whole_SD[wanted.start - block.start : wanted.stop - block.start].numpy()

        blocks_per_task = max(1, TASK_BYTES * len(blocks) // case.row_bytes)
        spread(self._pool, fill_blocks, cut(len(rows) * len(blocks), blocks_per_task))

    def describe(self) -> dict[str, Any]:
        return {"kind": "seeded"}

    def close(self) -> None:
        self._pool.shutdown()


def fill_block(case: Case, row: int, block: int, into_SD: Tensor) -> None:
    """Draw one block of one row into a contiguous view that is just as long as the block."""
    left_positions = case.seq_len - block * BLOCK_POSITIONS
    assert into_SD.shape == (min(BLOCK_POSITIONS, left_positions), case.d_model), (tuple(into_SD.shape), block)
    generator = torch.Generator().manual_seed(block_seed(case.seed, row, block))
    torch.randn(into_SD.shape, generator=generator, out=into_SD)
    if case.input_scale != 1:
        # Not mul_: it would start torch's own threads under each thread of the pool.
        host_SD = into_SD.numpy()
        np.multiply(host_SD, np.float32(case.input_scale), out=host_SD)


def block_seed(seed: int, row: int, block: int) -> int:
    """The 63-bit seed of one block's generator."""
    digest = hashlib.sha256(f"frontier/1/{seed}/{row}/{block}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") & ~(1 << 63)
