"""Small cases and a made-up machine, for all tests of this room."""

from collections.abc import Callable

import pytest
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
def tensors_are_tiny(one_thread: None) -> None:
    """Here they are."""
