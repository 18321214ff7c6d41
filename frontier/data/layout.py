"""Where an array lies in a file, and whether that is what a case needs.

Takes    what a header says.
Gives    a checked `Layout`, or a refusal with both values.
Knows nothing of any one format.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from frontier.data.reading import InputFile
from frontier.errors import DataError

# Past 63 bits, or with more dimensions than NumPy has: Python refuses to print whole numbers of thousands of
# digits, so none may reach a message.
_SIZE_LIMIT, _RANK_LIMIT = 1 << 63, 64
_SHOWN_SIZES = 6


class Layout(NamedTuple):
    """One array in a file; `tensor` is its name, where the format gives names."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    tensor: str | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_shape(file: InputFile, layout: Layout, wanted: Mapping[str, int], case_name: str) -> None:
    """That the array has the sizes that the case gives for these keys, in order.

    Raises   DataError naming the first key that differs.
    """
    keys = ", ".join(wanted)
    if layout.shape == tuple(wanted.values()):
        return
    if len(layout.shape) != len(wanted):
        hint = f"save it with {len(wanted)} dimensions: {keys}"
    else:
        key, found = next(
            (key, found) for (key, size), found in zip(wanted.items(), layout.shape, strict=True) if found != size
        )
        hint = f"{key} is {found:,} in the file and {wanted[key]:,} in the case: mend one of them"
    raise DataError(
        f"{file.name} has shape {_show_shape(layout.shape)}, case {case_name} needs "
        f"{_show_shape(tuple(wanted.values()))} ({keys})",
        hint=hint,
    )


def check_size(file: InputFile, expected_bytes: int) -> None:
    """That the file ends where its header says.

    Raises   DataError if it was cut short, or goes on.
    """
    found_bytes = file.size_bytes
    if found_bytes < expected_bytes:
        raise DataError(
            f"{file.name} is cut short: {expected_bytes:,} bytes expected, {found_bytes:,} found",
            hint="copy or write it again",
        )
    if found_bytes > expected_bytes:
        raise DataError(
            f"{file.name} goes on behind its data: {expected_bytes:,} bytes expected, {found_bytes:,} found",
            hint="write it again: something else was appended to it",
        )


def check_header_is_whole(file: InputFile, header_bytes: int) -> None:
    """That the file is no shorter than its header.

    Raises   DataError if it is.
    """
    if file.size_bytes < header_bytes:
        raise DataError(
            f"{file.name} is cut short inside its header: at least {header_bytes:,} bytes expected, "
            f"{file.size_bytes:,} found",
            hint="copy or write it again",
        )


def checked_shape(name: str, shape: Any, hint: str) -> tuple[int, ...]:
    """The shape that a header gives, if an array could have it.

    Raises   DataError if it could not.
    """
    if isinstance(shape, list | tuple) and len(shape) <= _RANK_LIMIT:
        sizes = tuple(size for size in shape if type(size) is int and 0 <= size < _SIZE_LIMIT)
        if len(sizes) == len(shape):
            return sizes
    raise DataError(f"{name} has a broken header: it gives a shape that no array can have", hint=hint)


def broken_header(name: str, reason: BaseException, hint: str) -> DataError:
    """The refusal of what a parser choked on; the parser's own first line is the cause."""
    first_line = str(reason).partition("\n")[0][:120]
    return DataError(f"{name} has a broken header: {type(reason).__name__}: {first_line}", hint=hint)


def _show_shape(shape: tuple[int, ...]) -> str:
    more = f" × … ({len(shape)} sizes)" if len(shape) > _SHOWN_SIZES else ""
    return "[" + " × ".join(f"{size:,}" for size in shape[:_SHOWN_SIZES]) + more + "]"
