"""The device that kernels run on: made the current one, and asked for its compute capability.

Takes    a device.
Gives    a context, a capability.
Knows nothing of kernels.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOWHERE = nullcontext()  # may be entered again and again


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """(major, minor); an H200's for the CPU, on which Triton's interpreter walks through the same tiles."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton and third parties' kernels take the current device's stream, whatever device their tensors lie on."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():  # to enter and leave takes 2 us
        return _NOWHERE
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> tuple[int, bool]:
    """A device's current stream as a number, and whether it is being captured, if the device is the current one;
    (0, False) on a CPU."""
    if device.type != "cuda":
        return 0, False
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    # As Triton asks: a `torch.cuda.Stream` takes 2 us to make.
    return torch._C._cuda_getCurrentRawStream(index), torch._C._cuda_isCurrentStreamCapturing()
