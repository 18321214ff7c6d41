"""Lanes for all tests of this room: at once on the host, and late on threads of their own."""

from collections.abc import Iterator

import pytest
from river import DelayedLanes, MakeLanes

from frontier.stream.lanes import HostLanes, Lanes


@pytest.fixture(params=["host", "delayed"])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    if request.param == "host":
        yield HostLanes()
        return
    late = DelayedLanes()
    yield late
    late.close()


@pytest.fixture
def delayed() -> Iterator[MakeLanes]:
    made: list[DelayedLanes] = []

    def make(**options: object) -> Lanes:
        made.append(DelayedLanes(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for late in made:
        late.close()
