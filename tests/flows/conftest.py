"""Tensors here are tiny: threads that wait for one another would take most of the time."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "stream"))  # for lanes that are late


@pytest.fixture(autouse=True, scope="module")
def tensors_are_tiny(one_thread: None) -> None:
    """Here they are."""
