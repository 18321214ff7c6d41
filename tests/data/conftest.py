"""Small cases and their rows, a pool, refusals, failing calls and a small disk, for all tests of this room."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier.case import Case
from frontier.errors import DataError

MakeCase = Callable[..., Case]


@pytest.fixture
def make_case() -> MakeCase:
    def make(**sizes: Any) -> Case:
        shape = {"batch_size": 3, "seq_len": 5000, "d_model": 6, "heads": 2, "ffn_dim": 8, "layers": 1}
        return Case(**{"name": "small", **shape, **sizes})

    return make


@pytest.fixture
def case(make_case: MakeCase) -> Case:
    """Rows of 960 bytes, 2,880 in all."""
    return make_case(seq_len=40)


def random_rows(seed: int) -> torch.Tensor:
    return torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="x_BSD")
def input_rows() -> torch.Tensor:
    return random_rows(7)


@pytest.fixture(name="y_BSD")
def output_rows() -> torch.Tensor:
    return random_rows(8)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


@pytest.fixture
def refusal() -> Callable[..., tuple[str, str | None]]:
    """Calls what must be refused, and gives the sentence and the hint."""

    def refuse(call: Callable[..., object], *arguments: Any, **named: Any) -> tuple[str, str | None]:
        with pytest.raises(DataError) as caught:
            call(*arguments, **named)
        return str(caught.value), caught.value.hint

    return refuse


@pytest.fixture
def failing() -> Callable[[int], Callable[..., None]]:
    """Stands for a system call that fails with this errno."""

    def failing_with(number: int) -> Callable[..., None]:
        def fail(*arguments: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    return failing_with


@pytest.fixture
def small_disk(tmp_path: Path, mount_small_disk: Callable[[Path, str], Path]) -> Path:
    """A filesystem of 64 KiB."""
    return mount_small_disk(tmp_path / "disk", "64k")
