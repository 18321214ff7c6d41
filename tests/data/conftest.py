"""Small cases and a pool, for all tests of this room."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from frontier.case import Case

MakeCase = Callable[..., Case]


@pytest.fixture
def make_case() -> MakeCase:
    def make(**sizes: Any) -> Case:
        shape = {"batch_size": 3, "seq_len": 5000, "d_model": 6, "heads": 2, "ffn_dim": 8, "layers": 1}
        return Case(**{"name": "small", **shape, **sizes})

    return make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads
