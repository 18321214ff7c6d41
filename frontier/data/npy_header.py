"""Reads the header of an .npy file, and believes nothing in it unchecked; writes the one of an output.

Takes    an opened file, and the dtypes that its reader can use.
Gives    where the array lies, its shape and dtype.
Knows nothing of what the array is for.
"""

import io
import tokenize
from collections.abc import Mapping

import numpy as np
import torch

from frontier.data.layout import Layout, broken_header, check_header_is_whole, checked_shape
from frontier.data.reading import InputFile
from frontier.errors import DataError

HEADER_CAP_BYTES = 10_000  # NumPy's own: what is longer can crash Python's parser
_AGAIN = "write it again with numpy.save"


def npy_layout(file: InputFile, dtypes: Mapping[str, torch.dtype]) -> Layout:
    """The array of a file of format 1.0, 2.0 or 3.0. Whether the file is as long as it says is not yet checked.

    Raises   DataError if the header is none, is cut short, or describes what cannot be read here.
    """
    head = file.head(12 + HEADER_CAP_BYTES)
    version, header_bytes = _measure(file, head)
    try:
        # Format 3.0 differs from 2.0 in the encoding of field names alone, and arrays with fields are refused below.
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(io.BytesIO(head[8:header_bytes]), max_header_size=HEADER_CAP_BYTES)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError) as reason:
        raise broken_header(file.name, reason, _AGAIN) from None

    can_read = " or ".join(dtypes)
    if dtype.hasobject:
        raise DataError(
            f"{file.name} holds pickled Python objects (dtype {dtype.str}), this reads {can_read}",
            hint="nothing is ever unpickled; save x.astype(numpy.float32)",
        )
    if dtype.str not in dtypes:
        raise DataError(
            f"{file.name} has dtype {dtype.str} ({dtype.name}), this reads {can_read}",
            hint=f"save x.astype('{next(iter(dtypes))}')",
        )
    if fortran_order:
        raise DataError(f"{file.name} is in Fortran order, this reads C order", hint="save numpy.ascontiguousarray(x)")
    return Layout(dtypes[dtype.str], checked_shape(file.name, shape, _AGAIN), header_bytes)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """What `numpy.save` writes before a float32 array of this shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()


def _measure(file: InputFile, head: bytes) -> tuple[tuple[int, int], int]:
    """The format's version and the header's length, before NumPy's parser sees a byte of it."""
    magic = np.lib.format.MAGIC_PREFIX
    if not magic.startswith(head[: len(magic)]):
        raise DataError(f"{file.name} is no .npy file: it begins with {head[:6]!r}", hint=_AGAIN)
    prefix_bytes = 10 if head[6:7] == b"\x01" else 12
    check_header_is_whole(file, prefix_bytes)
    version = (head[6], head[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise DataError(
            f"{file.name} is of .npy format {version[0]}.{version[1]}, this reads 1.0, 2.0 and 3.0", hint=_AGAIN
        )
    text_bytes = int.from_bytes(head[8:prefix_bytes], "little")
    if text_bytes > HEADER_CAP_BYTES:
        raise DataError(
            f"{file.name} claims a header of {text_bytes:,} bytes, at most {HEADER_CAP_BYTES:,} are read", hint=_AGAIN
        )
    check_header_is_whole(file, prefix_bytes + text_bytes)
    return version, prefix_bytes + text_bytes
