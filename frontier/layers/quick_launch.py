"""Queues a compiled Triton kernel again and again, through the launcher that PyTorch keeps for its own.

Takes    a kernel that Triton compiled and launched once, its grid, its arguments but for those that change.
Gives    a callable that queues it with those that do.
Knows nothing of what the kernel computes.

Triton's own launcher reads all compile-time arguments anew and asks for hooks: some 10 us of the host, which then
sets the pace of small cases. PyTorch's reads what the kernel takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Where the rows lie, the number of the call, a stream.
Queue = Callable[[tuple[int, ...], int, int], Any]

_LETTERS = {"i32": "i", "i64": "l"}  # as PyTorch's launcher spells types; an address is an "O"


def launcher_of(
    compiled: Any, grid: tuple[int, int, int], own: Sequence[int], numbers: Sequence[int], constants: Sequence[Any]
) -> Queue:
    """The quick way where this PyTorch has it and the kernel asks for nothing beside its arguments; else Triton's.

    Order    the kernel's arguments are addresses of rows, `own` addresses, the call's number, `numbers`, `constants`
    """
    kinds = list(compiled.src.signature.values())[: -len(constants)]
    taken = [kind for kind in kinds if kind != "constexpr"]
    letters = ["O" if kind.startswith("*") else _LETTERS.get(kind) for kind in taken]
    metadata, quick = compiled.metadata, getattr(torch._C, "_StaticCudaLauncher", None)
    sizes = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    asks = any(getattr(metadata, name, False) for name in ("launch_cooperative_grid", "launch_pdl"))
    special = asks or any(sizes) or getattr(metadata, "num_ctas", 1) > 1 or torch.version.hip is not None
    if quick is None or special or None in letters:
        go = compiled[grid]
        return lambda rows, call, stream: go(*rows, *own, call, *numbers, *constants, stream=stream)
    # A number that is 1 is a constant to Triton, and not taken; scratch is taken, as no address, even where none is.
    tail = [number for number, kind in zip(numbers, kinds[-len(numbers) :], strict=True) if kind != "constexpr"]
    tail += [None for size in sizes if size is not None]  # type: ignore[misc]
    spelled = "".join(map(str, letters)) + "O" * sum(size is not None for size in sizes)
    fixed, queue = (compiled.function, *grid, metadata.num_warps, metadata.shared, spelled), quick._launch_kernel
    return lambda rows, call, stream: queue(*fixed, (*rows, *own, call, *tail), stream)
