"""No test computes on a card while somebody times on it."""

from collections.abc import Iterator

import pytest
import torch

from frontier.machine import Machine
from frontier.timelock import using_card


@pytest.fixture(autouse=True, scope="module")
def nobody_times() -> Iterator[None]:
    """A module that times itself puts a fixture of its own in the place of this one."""
    if not torch.cuda.is_available():
        yield
        return
    with using_card(Machine.detect("cuda")):
        yield
