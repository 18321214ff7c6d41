"""Arrays in files, opened with every size checked before a byte is allocated; nothing is ever unpickled.

Takes    a path, and the shape and types it must have.
Gives    read-only views; rows widened to float32; weights by name.
Knows nothing of where paths come from or what the numbers mean.
"""

from __future__ import annotations

import hashlib
import math
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from referee.errors import CannotJudge

Shape = tuple[int, ...]
NPY_HEADER_MOST_BYTES = 4096
# Generous: a name, a type, a shape and two offsets are under 300 bytes.
HEADER_MOST_BYTES, HEADER_ENTRY_BYTES = 1 << 20, 1024


# What numpy, ast, tokenize and safetensors raise on bytes that are not what they should be.
FAULTS: tuple[type[Exception], ...] = (
    *(OSError, ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError, KeyError),
    *(tokenize.TokenError, safetensors.SafetensorError),
)


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Whatever a library makes of a damaged file becomes one sentence."""
    try:
        yield
    except FAULTS as fault:
        said = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise CannotJudge(f"{path.name} is no whole {kind} file: {said}", hint="restore it, or run again") from fault


def open_npy(path: Path, dtypes: tuple[str, ...], shape: Shape) -> np.ndarray[Any, Any]:
    """Map a `.npy` file of exactly this shape, one of these types, in C order.

    Raises   CannotJudge; a file that is too short or too long for its own header is damaged.
    """
    with _reading(path, "npy"):
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                header = np.lib.format.read_array_header_1_0(file, max_header_size=NPY_HEADER_MOST_BYTES)
            else:
                header = np.lib.format.read_array_header_2_0(file, max_header_size=NPY_HEADER_MOST_BYTES)
            header_bytes = file.tell()
        found_shape, fortran, dtype = header
        found = f"{dtype.str}{list(found_shape)}{' in Fortran order' if fortran else ''}"
        if found_shape != shape or fortran or dtype.str not in dtypes:
            raise ValueError(f"found {found}, expected {' or '.join(dtypes)}{list(shape)}")
        size, wanted = path.stat().st_size, header_bytes + math.prod(shape) * dtype.itemsize
        if size != wanted:
            raise ValueError(f"{size:,} bytes, where its header promises {wanted:,}")
        array: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


def read_user_row(path: Path, tensor: str | None, shape: Shape, row: int) -> Tensor:
    """Row `row` of a user's input `[B, S, D]`, float32; half precision is widened.

    Raises   CannotJudge.
    """
    if not path.is_file():
        raise CannotJudge(f"the run's input {path} is not there", hint="put it back where the run read it")
    if path.suffix == ".npy":
        return torch.from_numpy(open_npy(path, ("<f4", "<f2"), shape)[row].astype(np.float32))
    if path.suffix != ".safetensors":
        raise CannotJudge(f"{path.name}: unknown kind of input file", hint="known kinds: .npy, .safetensors")
    with _reading(path, "safetensors"), safetensors.safe_open(path, framework="pt") as file:
        names = list(file.keys())
        name = tensor if tensor is not None else names[0] if len(names) == 1 else None
        if name not in names:
            raise ValueError(f"no tensor {tensor or '(unnamed)'} among {', '.join(sorted(names)[:8])}")
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape or view.get_dtype() not in ("F32", "F16", "BF16"):
            found = f"{view.get_dtype()}{view.get_shape()}"
            raise ValueError(f"{name} is {found}, expected F32, F16 or BF16{list(shape)}")
        return torch.as_tensor(view[row : row + 1][0]).to(torch.float32)


@contextmanager
def open_output(path: Path, shape: Shape) -> Iterator[Callable[[int, int, int], np.ndarray[Any, Any]]]:
    """Of an output `[B, S, D]`, float32: a function that gives positions `[start, stop)` of a row.

    Raises   CannotJudge.
    """
    if path.suffix == ".npy":
        array_BSD = open_npy(path, ("<f4",), shape)
        yield lambda row, start, stop: array_BSD[row, start:stop]
        return
    with _reading(path, "safetensors"):
        file = safetensors.safe_open(path, framework="np")
        if list(file.keys()) != ["y"]:
            raise ValueError(f"it holds {', '.join(sorted(file.keys())[:8]) or 'nothing'}, expected y alone")
        view = file.get_slice("y")
        if tuple(view.get_shape()) != shape or view.get_dtype() != "F32":
            raise ValueError(f"y is {view.get_dtype()}{view.get_shape()}, expected F32{list(shape)}")
    yield lambda row, start, stop: view[row : row + 1, start:stop][0]


def read_weights(path: Path, shapes: Mapping[str, Shape]) -> tuple[dict[str, Tensor], str]:
    """All weights by name, float32, and the SHA-256 of the file's bytes.

    Raises   CannotJudge, listing the names that are missing or too many.
    """
    size, wanted = path.stat().st_size, 4 * sum(math.prod(shape) for shape in shapes.values())
    if not wanted <= size <= wanted + HEADER_MOST_BYTES + HEADER_ENTRY_BYTES * len(shapes):
        raise CannotJudge(
            f"{path.name} has {size:,} bytes, where the case needs {wanted:,} for its weights",
            hint="the weights are damaged or of another case; run again",
        )
    with _reading(path, "safetensors"):
        raw = path.read_bytes()
        weights = safetensors.torch.load(raw)
    missing, extra = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
    if missing or extra:
        lacks, besides = ", ".join(missing[:4]) or "nothing", ", ".join(extra[:4]) or "nothing"
        raise CannotJudge(
            f"{path.name} lacks {lacks}, and has besides what it needs {besides}",
            hint="the names stand in configs/CONTRACT.md, section 1",
        )
    for name, tensor in weights.items():
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != torch.float32:
            found = f"{tensor.dtype}{list(tensor.shape)}"
            raise CannotJudge(
                f"{path.name}: {name} is {found}, expected torch.float32{list(shapes[name])}",
                hint="the weights are of another case; run again",
            )
    return weights, hashlib.sha256(raw).hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
