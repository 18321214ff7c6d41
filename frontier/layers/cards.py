"""The device that kernels run on: made the current one, and asked for its compute capability.

Takes    a device.
Gives    a context, a capability.
Knows nothing of kernels.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """(major, minor); an H200's for the CPU, on which Triton's interpreter walks through the same tiles."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton and third parties' kernels take the current device's stream, whatever device their tensors lie on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
