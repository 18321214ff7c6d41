"""Slots: the buffers that one slice travels in, allocated once and lent in turn.

Takes    a depth, the shape of the largest load, a device.
Gives    slots; poison for checks.
Knows nothing of files, layers or what the numbers mean.

Letters  B rows of the largest slice, S positions, D width. For a chunked row B counts positions and SD is what
         one of them may take.
"""

import contextlib
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from frontier.stream.pinned import PinnedBuffer

NOTE_LENGTH = 4


@dataclass(slots=True, kw_only=True)
class Slot:
    """Buffers for one slice on its way: in and out, on the host and on the device.

    A *note* is a few numbers that the work leaves beside its output; they travel down with it.
    """

    pinned_in_BSD: Tensor
    pinned_out_BSD: Tensor
    pinned_note: Tensor
    device_in_BSD: Tensor
    device_out_BSD: Tensor
    device_note: Tensor
    owned: list[PinnedBuffer] = field(default_factory=list)

    def poison_host(self) -> None:
        """Fill the host buffers with NaN, so that a read or download that is skipped cannot go unseen."""
        for tensor in (self.pinned_in_BSD, self.pinned_out_BSD, self.pinned_note):
            tensor.fill_(math.nan)

    def poison_device(self) -> None:
        """The same on the device, on the current lane."""
        for tensor in (self.device_in_BSD, self.device_out_BSD, self.device_note):
            tensor.fill_(math.nan)

    def lent(self, up: int, down: int) -> "Slot":
        """The same buffers, shortened to what one load takes of them."""
        return replace(
            self,
            pinned_in_BSD=self.pinned_in_BSD[:up],
            device_in_BSD=self.device_in_BSD[:up],
            pinned_out_BSD=self.pinned_out_BSD[:down],
            device_out_BSD=self.device_out_BSD[:down],
        )

    def release(self) -> None:
        for buffer in self.owned:
            buffer.release()
        self.owned.clear()


def make_ring(depth: int, shape_BSD: tuple[int, ...], device: torch.device) -> list[Slot]:
    """`depth` slots for loads of up to `shape_BSD` float32 values; pinned memory only where there is a card."""
    slots: list[Slot] = []
    with contextlib.ExitStack() as undo:
        for _ in range(depth):
            slots.append(_make_slot(shape_BSD, device))
            undo.callback(slots[-1].release)
        undo.pop_all()
    return slots


def _make_slot(shape_BSD: tuple[int, ...], device: torch.device) -> Slot:
    owned: list[PinnedBuffer] = []
    undo = contextlib.ExitStack()

    def host(*shape: int) -> Tensor:
        if device.type == "cpu":
            return torch.zeros(shape)
        owned.append(PinnedBuffer(*shape))
        undo.callback(owned[-1].release)
        return owned[-1].tensor

    with undo:  # pages that stay registered after their memory is gone could never be pinned again
        slot = Slot(
            pinned_in_BSD=host(*shape_BSD),
            pinned_out_BSD=host(*shape_BSD),
            pinned_note=host(NOTE_LENGTH),
            device_in_BSD=torch.empty(shape_BSD, device=device),
            device_out_BSD=torch.empty(shape_BSD, device=device),
            device_note=torch.zeros(NOTE_LENGTH, device=device),
            owned=owned,
        )
        undo.pop_all()
    return slot
