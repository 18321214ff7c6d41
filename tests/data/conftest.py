"""Small cases, a pool, refusals and a small disk, for all tests of this room."""

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
