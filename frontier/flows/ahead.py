"""The input of each chunk, read while the chunks before it are still worked on.

Takes    the steps that bring input, in order; what reads one.
Gives    the memory that a step's input lies in, whole.
Knows nothing of sources, lanes or what a step does.

A slot is lent when three steps are left to do, 5 ms of case 14 in chunks of 20,000, and reading one takes 11; a row's
first chunk is done in 6 ms, its last takes 44: two are read ahead.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice

import torch
from torch import Tensor

from frontier.flows.steps import Step
from frontier.ledger import INPUTS_AHEAD
from frontier.stream.pinned import PinnedBuffer

Read = Callable[[Step, Tensor], None]


class InputsAhead:
    """`count` buffers in turn, so many that the last upload out of one ended before it is read into again.

    Order    a slot is lent after the write of the step that lies its ring's depth back; that many steps hold at most
             `count` - `INPUTS_AHEAD` inputs, and that many more are being read.
    """

    def __init__(self, count: int, floats: int, pinned: bool) -> None:
        self._pinned: list[PinnedBuffer] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="frontier-ahead")
        self._begun: deque[Future[Tensor]] = deque()
        self._coming: Iterator[Step] = iter(())
        self._turn = 0
        self._buffers: list[Tensor] = []
        try:
            for _ in range(count):
                if pinned:
                    self._pinned.append(PinnedBuffer(floats))
                self._buffers.append(self._pinned[-1].tensor if pinned else torch.zeros(floats))
        except BaseException:
            self.close()  # pages that stay registered are lost to the process
            raise

    def expect(self, coming: Iterable[Step]) -> None:
        """The steps of a new pass, all that will be taken; what an earlier one left begun is waited for."""
        wait([future for future in self._begun if not future.cancel()])
        self._begun.clear()
        self._coming = iter(coming)

    def take(self, read: Read) -> Tensor:
        """Where the next step's input lies; those behind it are begun. Raises whatever `read` raised."""
        self._begin(read, 1)
        found = self._begun.popleft().result()
        self._begin(read, INPUTS_AHEAD)
        return found

    def close(self) -> None:
        """Whatever is being read is waited for: it may write into memory that is given back here."""
        self.expect(())
        self._pool.shutdown()
        for buffer in self._pinned:
            buffer.release()

    def _begin(self, read: Read, most: int) -> None:
        for step in islice(self._coming, max(0, most - len(self._begun))):
            buffer = self._buffers[self._turn % len(self._buffers)]
            self._turn += 1
            self._begun.append(self._pool.submit(self._fill, read, step, buffer))

    @staticmethod
    def _fill(read: Read, step: Step, buffer: Tensor) -> Tensor:
        read(step, buffer)
        return buffer
