"""Hashes rows on many cores, and files.

Takes    a row in host memory, or a path.
Gives    SHA-256 in hexadecimal (contract section 6).
Knows nothing of where a row came from.

Shapes   S positions, D width.
"""

import hashlib
from concurrent.futures import Executor
from pathlib import Path

import torch
from torch import Tensor

from frontier.data.generate import BLOCK_POSITIONS
from frontier.data.memory import spread
from frontier.errors import DataError
from frontier.spans import Span, cut


def row_hash(row_SD: Tensor, pool: Executor) -> str:
    """SHA-256 of the concatenated SHA-256 digests of a row's blocks, each as little-endian float32."""
    assert row_SD.dtype == torch.float32 and row_SD.ndim == 2 and row_SD.is_contiguous()
    host_SD = row_SD.numpy().astype("<f4", copy=False)
    digests: dict[Span, bytes] = {}

    def hash_block(block: Span) -> None:
        digests[block] = hashlib.sha256(host_SD[block.as_slice()].reshape(-1).data).digest()

    blocks = list(cut(len(host_SD), BLOCK_POSITIONS))
    spread(pool, hash_block, blocks)
    return hashlib.sha256(b"".join(digests[block] for block in blocks)).hexdigest()


def file_hash(path: str | Path) -> str:
    """SHA-256 of a file's bytes.

    Raises   DataError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as reason:
        raise DataError(
            f"{path} cannot be hashed: {reason.strerror}", hint="give the path of a file that you may read"
        ) from None
