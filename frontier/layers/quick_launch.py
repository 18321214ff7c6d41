"""Queues a compiled Triton kernel again and again, through the launcher that PyTorch keeps for its own.

Takes    a kernel that Triton compiled and launched once, its grid and compile-time arguments.
Gives    a callable that queues it with other arguments.
Knows nothing of what the kernel computes.

Triton's own launcher reads all compile-time arguments anew and asks for hooks: some 10 us of the host, which then
sets the pace of small cases. PyTorch's reads what the kernel takes.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

# Addresses and numbers in the kernel's order, without its compile-time arguments; a stream.
Queue = Callable[[Sequence[int], int], Any]

_LETTERS = {"i32": "i", "i64": "l"}  # as PyTorch's launcher spells types; an address is an "O"


def launcher_of(compiled: Any, grid: tuple[int, int, int], constants: Sequence[Any]) -> Queue:
    """The quick way where this PyTorch has it and the kernel asks for nothing beside its arguments; else Triton's."""
    kinds = list(compiled.src.signature.values())[: -len(constants)]
    # A number that is 1 is a constant to Triton: the kernel does not take it.
    taken = [index for index, kind in enumerate(kinds) if kind != "constexpr"]
    letters = ["O" if kinds[index].startswith("*") else _LETTERS.get(kinds[index]) for index in taken]
    metadata, quick = compiled.metadata, getattr(torch._C, "_StaticCudaLauncher", None)
    sizes = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    no_scratch = [None for size in sizes if size is not None]  # which the kernel takes as addresses all the same
    special = metadata.num_ctas > 1 or metadata.launch_cooperative_grid or metadata.launch_pdl or any(sizes)
    if quick is None or special or None in letters:
        go = compiled[grid]
        return lambda arguments, stream: go(*arguments, *constants, stream=stream)
    fixed = (compiled.function, *grid, metadata.num_warps, metadata.shared)
    spelled, queue, pick = "".join(map(str, letters)) + "O" * len(no_scratch), quick._launch_kernel, itemgetter(*taken)
    return lambda arguments, stream: queue(*fixed, spelled, (*pick(arguments), *no_scratch), stream)
