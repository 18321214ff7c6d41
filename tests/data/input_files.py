"""Input files of the case `small`, sound as the libraries save them or put together byte by byte."""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from frontier.data.files import open_source
from frontier.spans import Span, cut

DATA_BYTES = 3 * 40 * 6 * 4
ALL = Span(0, 3)
AGAIN_NPY = "write it again with numpy.save"
AGAIN_SAFETENSORS = "write it again with safetensors.torch.save_file"
CUT_SHORT = "copy or write it again"
THREE_DIMENSIONS = "save it with 3 dimensions: batch_size, seq_len, d_model"
BROKEN = "has a broken header: "
NO_SHAPE = BROKEN + "it gives a shape that no array can have"


def read_all(path, case, tensor=None, *, rows_per_read=3, threads=2) -> torch.Tensor:
    source = open_source(path, case, tensor, threads)
    whole = torch.full((case.batch_size, case.seq_len, case.d_model), float("nan"))
    for rows in cut(case.batch_size, rows_per_read):
        source.read(rows, whole[rows.as_slice()])
    source.close()
    return whole


def save(path: Path, x_BSD: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, x_BSD.numpy())
    else:
        save_file({"x": x_BSD}, path)
    return path


def npy_bytes(header: str, version: int = 1, claimed_bytes: int | None = None) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header) if claimed_bytes is None else claimed_bytes)
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode("latin1") + bytes(DATA_BYTES)


def npy_header(shape: str = "(3, 40, 6)", descr: str = "'<f4'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def safetensors_bytes(table: object, data_bytes: int = DATA_BYTES) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def entry(begin: int = 0, stop: int = DATA_BYTES, shape: object = (3, 40, 6), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}
