"""One nursery for all tests of this room, and what a run leaves that nobody disturbs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import GO_ON, kept_bytes
from nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    words = [word for word in GO_ON if word != "--resume"]
    assert nursery.run(folder, *words)["ending"] == 0
    found = kept_bytes(folder)
    assert len(found) == 4, found.keys()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
