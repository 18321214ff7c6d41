"""For all tests: no deadline on a Hypothesis example, since a busy machine is no fault of the code."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from frontier import timelock

settings.register_profile("frontier", deadline=None)
settings.load_profile("frontier")


@pytest.fixture(scope="session")
def locks_folder() -> Iterator[Path]:
    """As open as the temp folder itself: some tests run as another user."""
    with tempfile.TemporaryDirectory(prefix="frontier-locks-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_locks(request: pytest.FixtureRequest, locks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two test runs on one CPU do not lock each other out; a card is locked for real."""
    if request.node.get_closest_marker("card") is None:
        monkeypatch.setattr(timelock, "folder", lambda: locks_folder)
