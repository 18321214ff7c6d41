"""Slots are made whole or not at all: what was pinned is let go when a later allocation fails."""

import pytest
import torch

from frontier.errors import DoesNotFit
from frontier.stream import ring

SHAPE = (2, 3, 4)
BUFFERS_A_SLOT = 3


class FakePinned:
    """Counts what is pinned; refuses once `most` buffers are."""

    held = 0
    most = 1000

    def __init__(self, *shape: int) -> None:
        if FakePinned.held >= FakePinned.most:
            raise DoesNotFit("the system refuses to pin")
        FakePinned.held += 1
        self.tensor = torch.zeros(shape)

    def release(self) -> None:
        FakePinned.held -= 1


@pytest.fixture(autouse=True)
def fake_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "PinnedBuffer", FakePinned)
    monkeypatch.setattr(FakePinned, "held", 0)


@pytest.mark.parametrize("most", range(3 * BUFFERS_A_SLOT))
def test_pinning_that_fails_anywhere_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(FakePinned, "most", most)
    with pytest.raises(DoesNotFit):
        ring.make_ring(3, SHAPE, torch.device("meta"))
    assert FakePinned.held == 0


@pytest.mark.parametrize("turn", range(6))
def test_a_card_that_is_full_part_way_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    made, empty = [], torch.empty

    def sometimes_full(*shape: object, **options: object) -> torch.Tensor:
        if len(made) == turn:
            raise torch.OutOfMemoryError("the card is full")
        made.append(shape)
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(ring.torch, "empty", sometimes_full)
    with pytest.raises(torch.OutOfMemoryError):
        ring.make_ring(3, SHAPE, torch.device("meta"))
    assert FakePinned.held == 0


def test_slots_hold_what_they_pinned_until_released() -> None:
    slots = ring.make_ring(3, SHAPE, torch.device("meta"))
    assert FakePinned.held == 3 * BUFFERS_A_SLOT
    for slot in slots:
        slot.release()
        slot.release()
    assert FakePinned.held == 0
