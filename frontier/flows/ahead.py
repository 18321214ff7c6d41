"""The input of each chunk, read while the chunk before it is still worked on.

Takes    the steps that bring input, in order; what reads one.
Gives    the memory that a step's input lies in, whole.
Knows nothing of sources, lanes or what a step does.

A slot is lent when three steps are left to do, 5 ms of case 14 in chunks of 20,000; to read one takes 11.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from frontier.flows.steps import Step
from frontier.stream.pinned import PinnedBuffer

Read = Callable[[Step, Tensor], None]


class InputsAhead:
    """`count` buffers in turn, so many that the last upload out of one ended before it is read into again.

    Order    a slot is lent after the write of the step that lies its ring's depth back; that many steps hold at most
             `count` - 1 inputs, and one more is being read.
    """

    def __init__(self, count: int, floats: int, pinned: bool) -> None:
        self._pinned: list[PinnedBuffer] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="frontier-ahead")
        self._begun: Future[Tensor] | None = None
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
        if self._begun is not None and not self._begun.cancel():
            wait([self._begun])
        self._begun, self._coming = None, iter(coming)

    def take(self, step: Step, read: Read) -> Tensor:
        """Where the step's input lies; the next one is begun. Raises whatever `read` raised."""
        future = self._begun or self._begin(read)
        assert future is not None, f"{step} was not expected"
        found = future.result()
        self._begun = self._begin(read)
        return found

    def close(self) -> None:
        """Whatever is being read is waited for: it may write into memory that is given back here."""
        self.expect(())
        self._pool.shutdown()
        for buffer in self._pinned:
            buffer.release()

    def _begin(self, read: Read) -> Future[Tensor] | None:
        step = next(self._coming, None)
        if step is None:
            return None
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1

        def fill() -> Tensor:
            read(step, buffer)
            return buffer

        return self._pool.submit(fill)
