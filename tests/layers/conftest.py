"""Small cases and a made-up machine, for all tests of this room."""

from collections.abc import Callable, Iterator

import pytest
import torch
from stacks import small

from frontier.case import Case
from frontier.machine import Machine
from frontier.units import GIB


@pytest.fixture
def make_case() -> Callable[..., Case]:
    return small


@pytest.fixture
def laptop() -> Machine:
    return Machine(
        device="cpu", name="laptop", host_total_bytes=8 * GIB, host_available_bytes=4 * GIB, cores=2,
        device_budget_bytes=2 * GIB, pinned_budget_bytes=2 * GIB, host_budget_bytes=4 * GIB,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads that wait for one another would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
