"""Every Triton kernel compiles for every card that we serve, without one, and fits its shared memory."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from builds import BUILDS, SHARED_BYTES, Build, Capability, short
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import frontier.layers


def compiled(build: Build, capability: Capability) -> Any:
    """The kernel as a cubin, its numbers and pointers divisible by 16 as those of a launch are."""
    options = {name: build.sizes[name] for name in ("num_warps", "num_stages", "maxnreg") if name in build.sizes}
    constants = {name: value for name, value in build.sizes.items() if name not in options}
    order = build.kernel.arg_names
    signature = build.arguments | dict.fromkeys(constants, "constexpr")
    assert sorted(signature) == sorted(order), (signature, order)
    divisible = [n for n, kind in build.arguments.items() if kind.startswith("*") or kind == "i32"]
    source = ASTSource(
        build.kernel,
        {name: signature[name] for name in order},
        {(order.index(name),): value for name, value in constants.items()},
        {(order.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 3.9 tells once of a default of 3.10
        return triton.compile(source, target=target, options=options)


def faults(build: Build, capability: Capability) -> list[str]:
    kernel = compiled(build, capability)
    found = [] if len(kernel.asm["cubin"]) > 1000 else ["no cubin"]
    if kernel.metadata.shared > SHARED_BYTES[capability]:
        found.append(f"{kernel.metadata.shared} bytes of shared memory, the card has {SHARED_BYTES[capability]}")
    return found


@pytest.mark.parametrize("kernel", BUILDS)
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_every_kernel_compiles_within_the_cards_shared_memory(capability: Capability, kernel: str) -> None:
    built = {name: faults(build, capability) for name, build in BUILDS[kernel](capability)}
    assert built and not any(built.values()), built


def test_a_tile_too_large_for_a_card_would_be_seen() -> None:
    build = dict(short((8, 6)))["head width 256 fp16"]
    large = build._replace(sizes=build.sizes | {"M": 128, "N": 64})
    assert "bytes of shared memory, the card has 101376" in faults(large, (8, 6))[0]


def test_a_kernel_that_does_not_compile_would_be_seen() -> None:
    build = dict(short((8, 6)))["head width 8 fp16"]
    with pytest.raises(triton.CompilationError):
        faults(build._replace(sizes=build.sizes | {"P": 24}), (8, 6))  # no power of two


def test_no_kernel_is_left_out() -> None:
    """Each module of a Triton kernel under frontier/layers is in the table."""
    modules = {path.stem for path in Path(frontier.layers.__path__[0]).glob("*_triton.py")}
    rows = [build for builds in BUILDS.values() for _, build in builds((9, 0))]
    assert modules <= {build.kernel.__module__.rpartition(".")[2] for build in rows}
