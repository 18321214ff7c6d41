"""What a sink should leave behind, and what it says when it will not."""

import io
from pathlib import Path

import numpy as np
import torch

from frontier.spans import Span

OVERWRITE = "name another file, or allow it with --overwrite"
LEFT_OVER = "move it away if you need its rows, or allow it to be replaced with --overwrite"
LARGER_DISK = "free space, or name a file on a larger disk"
SOUND_DISK = "name a file on a sound disk"


def saved_bytes(y_BSD: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, y_BSD.numpy())
    return file.getvalue()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_all(sink, y_BSD: torch.Tensor) -> None:
    sink.write(Span(0, len(y_BSD)), y_BSD)
