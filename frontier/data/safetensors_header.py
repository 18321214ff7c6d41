"""Reads the header of a .safetensors file, and believes nothing in it unchecked; writes the one of an output.

Takes    an opened file, the dtypes that its reader can use, and perhaps a tensor's name.
Gives    where that tensor lies, its shape and dtype.
Knows nothing of what the tensor is for.

The safetensors package maps the files it opens; inputs are never mapped here.
"""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from frontier.data.layout import Layout, broken_header, check_header_is_whole, check_size, checked_shape
from frontier.data.reading import InputFile
from frontier.errors import DataError
from frontier.units import MIB

HEADER_CAP_BYTES = 8 * MIB  # some 80,000 tensors
INPUT_NAMES = ("x", "input")
OUTPUT_NAME = "y"
_SHOWN_NAMES, _SHOWN_LETTERS = 8, 60
_AGAIN = "write it again with safetensors.torch.save_file"


class _Entry(NamedTuple):
    begin_bytes: int
    stop_bytes: int
    shape: tuple[int, ...]
    dtype: str


def safetensors_layout(file: InputFile, dtypes: Mapping[str, torch.dtype], tensor: str | None) -> Layout:
    """The named tensor, or else the one called `x` or `input`, or else the only one with three
    dimensions, or else the only one.

    Raises   DataError if the header is none, the tensors do not fill the file one after another, the
             tensor is not there, or it is of a dtype that cannot be read here.
    """
    data_begin_bytes, entries = _read_entries(file)
    _check_places(file, data_begin_bytes, entries)
    chosen = _choose(file.name, entries, tensor)
    entry = entries[chosen]
    if entry.dtype not in dtypes:
        raise DataError(
            f"{file.name}: {_show(chosen)} has dtype {entry.dtype!r}, this reads {' or '.join(dtypes)}",
            hint="save x.float()",
        )
    layout = Layout(dtypes[entry.dtype], entry.shape, data_begin_bytes + entry.begin_bytes, chosen)
    placed_bytes = entry.stop_bytes - entry.begin_bytes
    if layout.num_bytes != placed_bytes:
        raise DataError(
            f"{file.name}: the shape and dtype of {_show(chosen)} need {layout.num_bytes:,} bytes, "
            f"its data_offsets leave {placed_bytes:,}",
            hint=_AGAIN,
        )
    return layout


def safetensors_header(shape: tuple[int, ...]) -> bytes:
    """What stands before a single float32 tensor, called `y`, as `safetensors.torch.save_file` writes it."""
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 4 * math.prod(shape)]}
    text = json.dumps({OUTPUT_NAME: entry}, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _read_entries(file: InputFile) -> tuple[int, dict[str, _Entry]]:
    """Where the data begins, and each tensor's entry."""
    check_header_is_whole(file, 8)
    text_bytes = int.from_bytes(file.head(8), "little")
    if text_bytes > HEADER_CAP_BYTES:
        raise DataError(
            f"{file.name} claims a header of {text_bytes:,} bytes, at most {HEADER_CAP_BYTES:,} are read", hint=_AGAIN
        )
    check_header_is_whole(file, 8 + text_bytes)
    try:
        table = json.loads(file.head(8 + text_bytes)[8:].decode("utf-8"), object_pairs_hook=_without_twins)
        if not isinstance(table, dict):
            raise TypeError("it holds no table of tensors")
        table.pop("__metadata__", None)
        return 8 + text_bytes, {name: _read_entry(file.name, entry) for name, entry in table.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as reason:
        raise broken_header(file.name, reason, _AGAIN) from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; twice the same key, and two readers could see two different tensors."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands there twice")
    return table


def _read_entry(file_name: str, entry: Any) -> _Entry:
    begin_bytes, stop_bytes = checked_shape(file_name, entry["data_offsets"], _AGAIN)
    return _Entry(
        begin_bytes, stop_bytes, checked_shape(file_name, entry["shape"], _AGAIN), str(entry["dtype"])[:_SHOWN_LETTERS]
    )


def _check_places(file: InputFile, data_begin_bytes: int, entries: Mapping[str, _Entry]) -> None:
    """The format's own rule: the tensors fill the rest of the file, without a gap and without sharing a byte."""
    end_bytes = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][:2]):
        if entry.begin_bytes != end_bytes or entry.stop_bytes < entry.begin_bytes:
            raise DataError(
                f"{file.name} places {_show(name)} at bytes {entry.begin_bytes:,} to {entry.stop_bytes:,} of its data, "
                f"what lies before it ends at {end_bytes:,}",
                hint=_AGAIN,
            )
        end_bytes = entry.stop_bytes
    check_size(file, data_begin_bytes + end_bytes)


def _choose(file_name: str, entries: Mapping[str, _Entry], tensor: str | None) -> str:
    if tensor is not None and tensor in entries:
        return tensor
    shown = [_show(name) for name in entries][:_SHOWN_NAMES]
    more = f" and {len(entries) - len(shown)} more" if len(entries) > len(shown) else ""
    holds = f"it holds {', '.join(shown) or 'none'}{more}"
    if tensor is not None:
        nearest = difflib.get_close_matches(tensor, entries, n=1)
        raise DataError(
            f"{file_name} has no tensor {_show(tensor)}: {holds}",
            hint=f"did you mean {_show(nearest[0])}?" if nearest else "name one that is there",
        )
    named = [name for name in INPUT_NAMES if name in entries]
    deep = [name for name, entry in entries.items() if len(entry.shape) == 3]
    for names in (named, deep, list(entries)):
        if len(names) == 1:
            return names[0]
    raise DataError(f"{file_name} does not show which tensor is the input: {holds}", hint="name it, or save it as `x`")


def _show(name: str) -> str:
    return repr(name[:_SHOWN_LETTERS])
