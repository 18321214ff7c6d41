"""Hashes rows on many cores, and files.

Takes    a row in host memory, or a path.
Gives    SHA-256 in hexadecimal (contract section 6).
Knows nothing of where a row came from.

Shapes   S positions, D width.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frontier.case import BLOCK_POSITIONS, Case
from frontier.data.memory import spread
from frontier.errors import DataError
from frontier.spans import Span, cut
from frontier.units import MIB

PIECE_BYTES = MIB  # read back into memory of its own, one piece a thread


def row_hash(row_SD: Tensor, pool: Executor) -> str:
    """A row's hash; the row is taken as little-endian float32."""
    assert row_SD.dtype == torch.float32 and row_SD.ndim == 2 and row_SD.is_contiguous()
    host_SD = row_SD.numpy().astype("<f4", copy=False)
    return hash_of_blocks(
        len(host_SD), lambda block: hashlib.sha256(host_SD[block.as_slice()].reshape(-1).data).digest(), pool
    )


def hash_of_blocks(seq_len: int, digest_of: Callable[[Span], bytes], pool: Executor) -> str:
    """SHA-256 of the concatenated SHA-256 digests of a row's blocks, wherever its `seq_len` positions lie."""
    digests: dict[Span, bytes] = {}

    def digest_block(block: Span) -> None:
        digests[block] = digest_of(block)

    blocks = list(cut(seq_len, BLOCK_POSITIONS))
    spread(pool, digest_block, blocks)
    return hashlib.sha256(b"".join(digests[block] for block in blocks)).hexdigest()


def hash_in_file(row: int, case: Case, read_into: Callable[[memoryview, int], None], pool: Executor) -> str:
    """A row's hash as it lies in a file; `read_into` fills memory with what stands at a place behind the header."""
    position_bytes = case.row_bytes // case.seq_len

    def digest_of(block: Span) -> bytes:
        num_bytes = len(block) * position_bytes
        found, buffer = hashlib.sha256(), memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
        begin_bytes = row * case.row_bytes + block.start * position_bytes
        for piece in cut(num_bytes, len(buffer)):
            read_into(buffer[: len(piece)], begin_bytes + piece.start)
            found.update(buffer[: len(piece)])
        return found.digest()

    return hash_of_blocks(case.seq_len, digest_of, pool)


class RowHash:
    """A row's hash from its parts, from the first to the last, however they are cut."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._blocks, self._open = hashlib.sha256(), hashlib.sha256()
        self.num_positions = 0

    def add(self, part_SD: Tensor) -> None:
        assert part_SD.dtype == torch.float32 and part_SD.ndim == 2 and part_SD.is_contiguous()
        host_SD = part_SD.numpy().astype("<f4", copy=False)
        begun = -self.num_positions % BLOCK_POSITIONS  # positions that end the block begun last
        self._add_to_open(host_SD[:begun])
        whole = [block for block in cut(len(host_SD[begun:]), BLOCK_POSITIONS) if len(block) == BLOCK_POSITIONS]
        digests: dict[Span, bytes] = {}

        def digest_block(block: Span) -> None:
            digests[block] = hashlib.sha256(host_SD[begun:][block.as_slice()].reshape(-1).data).digest()

        spread(self._pool, digest_block, whole)
        for block in whole:
            self._blocks.update(digests[block])
            self.num_positions += BLOCK_POSITIONS
        self._add_to_open(host_SD[begun + BLOCK_POSITIONS * len(whole) :])

    def hexdigest(self) -> str:
        """Of all that was added so far; nothing may be added behind it."""
        if self.num_positions % BLOCK_POSITIONS:
            self._blocks.update(self._open.digest())
        return self._blocks.hexdigest()

    def _add_to_open(self, host_SD: NDArray[np.float32]) -> None:
        self._open.update(host_SD.reshape(-1).data)
        self.num_positions += len(host_SD)
        if len(host_SD) and self.num_positions % BLOCK_POSITIONS == 0:
            self._blocks.update(self._open.digest())
            self._open = hashlib.sha256()


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
