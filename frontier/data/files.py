"""Rows out of .npy and .safetensors files, read in big pieces on several threads, never mapped.

Takes    a path, and the case whose input it claims to be.
Gives    a source, after everything that its header says has been checked.
Knows nothing of what becomes of the rows.

Shapes   B rows, S positions, D width.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.data.layout import Layout, check_shape, check_size
from frontier.data.memory import assert_holds, bytes_of, spread
from frontier.data.npy_header import npy_layout
from frontier.data.reading import InputFile
from frontier.data.safetensors_header import safetensors_layout
from frontier.errors import DataError
from frontier.spans import Span, cut
from frontier.units import MIB

PIECE_BYTES = 16 * MIB
# Below torch's grain of 32,768 elements a conversion stays on the thread that asks for it.
SERIAL_ELEMENTS = 1 << 14

_NPY_DTYPES = {"<f4": torch.float32, "<f2": torch.float16}
_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_source(path: str | Path, case: Case, tensor: str | None = None, threads: int = 4) -> "FileSource":
    """The file as the case's input. `tensor` names one of a .safetensors file.

    Raises   DataError if the file is not there, not whole, or not of the case's shape and a dtype we read.
    """
    suffix = Path(path).suffix
    if suffix not in (".npy", ".safetensors"):
        raise DataError(
            f"{path} ends in `{suffix}`, an input ends in .npy or .safetensors",
            hint="save it with numpy.save or safetensors.torch.save_file",
        )
    if suffix == ".npy" and tensor is not None:
        raise DataError(f"{path} holds one array without a name, tensor {tensor!r} was asked of it", hint="name none")
    file = InputFile(path)
    try:
        if suffix == ".npy":
            layout = npy_layout(file, _NPY_DTYPES)
        else:
            layout = safetensors_layout(file, _SAFETENSORS_DTYPES, tensor)
        wanted = {"batch_size": case.batch_size, "seq_len": case.seq_len, "d_model": case.d_model}
        check_shape(file, layout, wanted, case.name)
        if suffix == ".npy":
            check_size(file, layout.offset_bytes + layout.num_bytes)
    except BaseException:
        file.close()
        raise
    return FileSource(file, layout, case, threads)


class FileSource:
    """Rows of one array in a file, as float32. Made by `open_source`."""

    def __init__(self, file: InputFile, layout: Layout, case: Case, threads: int) -> None:
        self._file = file
        self._layout = layout
        self._case = case
        # Not O_DIRECT: 1.1 to 1.2 GB/s, where the page cache gave 0.9 to 2.0 cold and 6 to 8 warm (ext4, virtual disk).
        self.how = f"preads of {PIECE_BYTES // MIB} MiB through the page cache, {threads} at a time"
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
        self._piece_elements = PIECE_BYTES // layout.dtype.itemsize
        self._scratches: SimpleQueue[Tensor] = SimpleQueue()
        if layout.dtype != torch.float32:
            most_elements = min(self._piece_elements, case.input_bytes // torch.float32.itemsize)
            for _ in range(threads):
                self._scratches.put(torch.empty(most_elements, dtype=layout.dtype))

    def read(self, rows: Span, into_BSD: Tensor, positions: Span | None = None) -> None:
        """Fill `into_BSD` with `rows`, or a part of one row, widened to float32.

        Raises   DataError if the file cannot be read, or is no longer the one that was opened.
        """
        assert_holds(into_BSD, rows, self._case, positions)
        into = into_BSD.view(-1)
        itemsize = self._layout.dtype.itemsize
        first_position = rows.start * self._case.seq_len + (positions.start if positions else 0)
        begin_bytes = self._layout.offset_bytes + first_position * self._case.d_model * itemsize

        def read_piece(piece: Span) -> None:
            self._read_piece(into[piece.as_slice()], begin_bytes + piece.start * itemsize)

        spread(self._pool, read_piece, cut(into.numel(), self._piece_elements))
        self._file.check_unchanged()

    def describe(self) -> dict[str, Any]:
        named = {"tensor": self._layout.tensor} if self._layout.tensor is not None else {}
        return {"kind": "file", "path": self._file.path, **named, **self._file.state}

    def close(self) -> None:
        """Let go of file and threads.

        Raises   DataError if the file is no longer the one that was opened.
        """
        self._pool.shutdown()
        self._file.close()
        self._file.check_unchanged()

    def _read_piece(self, into: Tensor, offset_bytes: int) -> None:
        if self._layout.dtype == torch.float32:
            self._file.read_into(bytes_of(into), offset_bytes)
            return
        scratch = self._scratches.get()
        try:
            half = scratch[: into.numel()]
            self._file.read_into(bytes_of(half), offset_bytes)
            for wide, narrow in zip(
                torch.split(into, SERIAL_ELEMENTS), torch.split(half, SERIAL_ELEMENTS), strict=True
            ):
                wide.copy_(narrow)
        finally:
            self._scratches.put(scratch)
