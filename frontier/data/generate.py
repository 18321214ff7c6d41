"""Makes any part of any row from (seed, row, block), so that inputs never depend on how they are cut.

Takes    a case's seed, and which rows are wanted, or which part of a row.
Gives    standard normal rows times the case's input scale (contract section 4).
Knows nothing of slices, plans or ranks.

Shapes   B rows, S positions, D width.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier.case import BLOCK_POSITIONS, Case
from frontier.data.memory import assert_holds, copy, spread
from frontier.spans import Span, cut
from frontier.units import MIB

# Short rows share a task: a future costs about as much as drawing 16 KiB.
TASK_BYTES = MIB

# What was drawn ahead must not wait behind what is being drawn: 26 ms a block, and a chunk's slot is wanted in 5.
COPY_THREADS = 4


class SeededSource:
    """A case's seeded rows, drawn in parallel: whole rows straight into the caller's memory, parts of a row ahead.

    A part has fewer blocks than there are threads, so those behind it, which a reader in order wants next, are drawn
    meanwhile: no more than there are threads, nor than fill a row, as the ledger says. Any order gives the same bytes.
    """

    def __init__(self, case: Case, threads: int) -> None:
        self._case = case
        self._blocks = list(cut(case.seq_len, BLOCK_POSITIONS))  # of each row
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="generate")
        self._copiers = ThreadPoolExecutor(min(threads, COPY_THREADS), thread_name_prefix="generate-copy")
        self._most_ahead = max(1, min(threads, case.seq_len // BLOCK_POSITIONS))
        # By the block's number in the batch: who draws it, and where.
        self._ahead: dict[int, tuple[Future[None], Tensor]] = {}
        self._free: list[Tensor] = []  # such memory, to be used again: its pages are there already
        self._lock = Lock()  # for what lies ahead: one part is read at a time

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        case, blocks = self._case, self._blocks
        assert_holds(into_BSD, rows, case, positions)
        if positions is not None:
            with self._lock:
                self._read_part(rows.start, into_BSD[0], positions)
            return

        def fill_blocks(task: Span) -> None:
            for turn in range(task.start, task.stop):
                row, number = divmod(turn, len(blocks))
                fill_block(case, rows.start + row, number, into_BSD[row, blocks[number].as_slice()])

        blocks_per_task = max(1, TASK_BYTES * len(blocks) // case.row_bytes)
        spread(self._pool, fill_blocks, cut(len(rows) * len(blocks), blocks_per_task))

    def _read_part(self, row: int, into_SD: Tensor, within: Span) -> None:
        first, straight = row * len(self._blocks), dict[int, Future[None]]()
        wanted = range(first + within.start // BLOCK_POSITIONS, first - (-within.stop // BLOCK_POSITIONS))
        parts = {at: self._blocks[at - first] for at in wanted}
        try:
            for at, block in parts.items():
                if within.start <= block.start and block.stop <= within.stop and at not in self._ahead:
                    block_SD = into_SD[block.start - within.start : block.stop - within.start]
                    straight[at] = self._pool.submit(fill_block, self._case, row, at - first, block_SD)
            self._look_ahead(wanted.start, straight)
            for at, block in parts.items():
                if at not in straight:
                    future, block_SD = drawn = self._ahead.pop(at)
                    future.result()
                    self._ahead[at] = drawn  # one that could not be drawn is drawn anew if wanted again
                    part = Span(max(block.start, within.start), min(block.stop, within.stop))
                    from_SD = block_SD[part.start - block.start : part.stop - block.start]
                    copy(self._copiers, into_SD[part.start - within.start : part.stop - within.start], from_SD)
                # A block stays until its end is read, so that a reader in order has it drawn once.
                self._look_ahead(at + (block.stop <= within.stop), straight)
            for future in straight.values():
                future.result()
        finally:  # as in `spread`: nothing may write into the caller's memory from here on
            wait([future for future in straight.values() if not future.cancel()])

    def _look_ahead(self, at: int, straight: dict[int, Future[None]]) -> None:
        """Have just the blocks from `at` on drawn, as many as may lie ahead, but for those that go `straight`."""
        stop = min(self._case.batch_size * len(self._blocks), at + self._most_ahead + len(straight))
        places = [place for place in range(at, stop) if place not in straight][: self._most_ahead]
        stale = [self._ahead.pop(place) for place in self._ahead.keys() - set(places)]
        # Those being drawn hold threads that the next ones need: waiting for them is free, and bounds the memory.
        wait([future for future, _ in stale if not future.cancel()])
        self._free.extend(block_SD for _, block_SD in stale)
        for place in places:
            if place not in self._ahead:
                row, number = divmod(place, len(self._blocks))
                block_SD = self._free.pop() if self._free else torch.empty(len(self._blocks[0]), self._case.d_model)
                into_SD = block_SD[: len(self._blocks[number])]
                self._ahead[place] = self._pool.submit(fill_block, self._case, row, number, into_SD), block_SD

    def describe(self) -> dict[str, Any]:
        return {"kind": "seeded"}

    def close(self) -> None:
        with self._lock:
            self._look_ahead(self._case.batch_size * len(self._blocks), {})  # there is nothing: drops all
            self._free.clear()
        self._pool.shutdown()
        self._copiers.shutdown()


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
