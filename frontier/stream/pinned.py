"""Host memory of exact size that a card can copy from and to at full speed.

Takes    a shape.
Gives    a float32 tensor over page-locked memory, and its release.
Knows nothing of slots or slices.
"""

import contextlib
import math
import mmap
import time

import numpy as np
import torch
from torch import Tensor

from frontier.errors import DoesNotFit
from frontier.units import GIB, MIB, show_bytes

FLOAT32_BYTES = 4


class PinnedBuffer:
    """Page-locked float32 memory of exactly the bytes asked for, rounded up to a page.

    PyTorch's own pinned allocator rounds up to a power of two (13.1 GB would become 16 GiB:
    pytorch#95823), so pages are mapped here and registered with CUDA.

    Raises   DoesNotFit if the system will not lock that much.
    """

    def __init__(self, *shape: int) -> None:
        self.num_bytes = max(1, math.prod(shape)) * FLOAT32_BYTES
        # Private: shared memory gets no huge pages where the system keeps them from its shmem.
        self._pages = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages make faulting and registering several times faster; a kernel without them says no. A child must not
        # make these pages copied on write: the card knows only the first ones.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):
                self._pages.madvise(getattr(mmap, advice))
        self._array = np.frombuffer(self._pages, dtype=np.float32, count=math.prod(shape))
        self.tensor: Tensor = torch.from_numpy(self._array).view(shape)
        self.tensor.zero_()  # touch every page with all cores; registering untouched pages faults them one by one
        status = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.num_bytes, 0)
        if int(status) != 0:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # takes the error away: CUDA would report it to the next kernel
            raise DoesNotFit(
                f"the system refuses to pin {show_bytes(self.num_bytes)} of host memory (CUDA error {int(status)})",
                hint="lower --pinned-budget (256MiB works under WSL and in small containers), or raise `ulimit -l`",
            )

    def release(self) -> None:
        """Unlock the pages. The tensor must not be used by a copy any more."""
        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


def probe_pinning() -> float | None:
    """Seconds to pin a GiB, measured on 64 MiB; None if the system refuses even that."""
    began_s = time.perf_counter()
    try:
        PinnedBuffer(64 * MIB // FLOAT32_BYTES).release()
    except DoesNotFit:
        return None
    return (time.perf_counter() - began_s) * GIB / (64 * MIB)
