"""Which launcher a compiled kernel gets, and what it is told; a made-up kernel, since no card is here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier.layers.quick_launch import launcher_of

SIGNATURE = {
    "x_ptr": "*fp32",
    "w_ptr": "*fp16",
    "call": "i32",
    "S": "i32",
    "stride": "i64",
    "D": "constexpr",
    "FAST": "constexpr",
}
PLAIN = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "num_warps": 4, "shared": 96}


class Kernel:
    """What Triton gives, as far as it is looked at; it remembers what its own launcher was told."""

    def __init__(self, signature: dict[str, str], **metadata: Any) -> None:
        self.src, self.function, self.told = SimpleNamespace(signature=signature), 77, list[Any]()
        self.metadata = SimpleNamespace(**{**PLAIN, **metadata})

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.told.append((grid, arguments, stream))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    told: list[Any] = []
    launcher = SimpleNamespace(_launch_kernel=lambda *arguments: told.append(arguments))
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)
    return told


@pytest.mark.parametrize(
    ("signature", "metadata", "spelled", "arguments"),
    [
        (SIGNATURE, {}, "OOiil", (4096, 8192, 3, 5, 640)),
        (SIGNATURE, {"global_scratch_size": 0}, "OOiilO", (4096, 8192, 3, 5, 640, None)),
        (
            SIGNATURE,
            {"global_scratch_size": 0, "profile_scratch_size": 0},
            "OOiilOO",
            (4096, 8192, 3, 5, 640, None, None),
        ),
        (SIGNATURE | {"S": "constexpr"}, {}, "OOil", (4096, 8192, 3, 640)),
    ],
)
def test_the_quick_launcher_is_told_what_the_kernel_takes(
    quick: list[Any], signature: dict[str, str], metadata: dict[str, Any], spelled: str, arguments: tuple[Any, ...]
) -> None:
    kernel = Kernel(signature, **metadata)
    launcher_of(kernel, (6, 1, 1), (8192,), (5, 640), (128, True))((4096,), 3, 9)
    assert quick == [(77, 6, 1, 1, 4, 96, spelled, arguments, 9)] and not kernel.told


@pytest.mark.parametrize(
    ("signature", "metadata"),
    [
        (SIGNATURE, {"num_ctas": 2}),
        (SIGNATURE, {"launch_pdl": True}),
        (SIGNATURE, {"launch_cooperative_grid": True}),
        (SIGNATURE, {"global_scratch_size": 128}),
        (SIGNATURE, {"profile_scratch_size": 8}),
        (SIGNATURE | {"stride": "nvTmaDesc"}, {}),
    ],
)
def test_what_the_quick_launcher_cannot_do_goes_through_tritons(
    quick: list[Any], signature: dict[str, str], metadata: dict[str, Any]
) -> None:
    kernel = Kernel(signature, **metadata)
    launcher_of(kernel, (6, 1, 1), (8192,), (5, 640), (128, True))((4096,), 3, 9)
    assert kernel.told == [((6, 1, 1), (4096, 8192, 3, 5, 640, 128, True), 9)] and not quick


def test_a_pytorch_without_it_goes_through_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher", raising=False)
    kernel = Kernel(SIGNATURE)
    launcher_of(kernel, (6, 1, 1), (8192,), (5, 640), (128, True))((4096,), 3, 9)
    assert len(kernel.told) == 1
