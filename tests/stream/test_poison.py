"""Poison shows what the loop or its lanes left out; each planted fault must be seen, and nothing else."""

import pytest
import torch
from river import ROWS_PER_SLICE, CheatingHostLanes, Journey, MakeLanes, expected

from frontier.stream.lanes import Lanes
from frontier.stream.ring import NOTE_LENGTH, make_ring
from frontier.stream.trace import Verb

pytestmark = pytest.mark.timeout(20)
DEPTHS = [1, 2, 3, 5]
CARRIED: list[Verb] = ["upload", "compute", "download"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_poison_changes_no_number_of_honest_lanes(lanes: Lanes, depth: int) -> None:
    journey = Journey()
    journey.go(lanes, depth, poison=True)
    assert torch.equal(journey.output, expected(26))
    assert torch.stack(journey.notes).isfinite().all()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("verb", CARRIED)
def test_a_verb_skipped_on_the_host_shows_as_nan_everywhere(verb: Verb, depth: int) -> None:
    journey = Journey()
    journey.go(CheatingHostLanes(verb), depth, poison=True)
    assert journey.output.isnan().all()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("verb", CARRIED)
def test_a_verb_skipped_on_late_lanes_shows_as_nan_everywhere(delayed: MakeLanes, verb: Verb, depth: int) -> None:
    journey = Journey()
    journey.go(delayed(skip=[verb]), depth, poison=True)
    assert journey.output.isnan().all()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_mark_that_does_not_wait_is_caught(delayed: MakeLanes, depth: int) -> None:
    """The missing wait of pytorch#137878: the host reads the copy before it lands."""
    journey = Journey()
    journey.go(delayed(delay_s=0.01, waits=False), depth, poison=True)
    assert journey.output.isnan().any()


@pytest.mark.parametrize("verb", CARRIED)
def test_without_poison_a_stale_slot_looks_finite_and_with_poison_it_cannot(verb: Verb) -> None:
    """Slots that a whole honest run has filled, then lanes that skip a verb: the reason poison exists."""
    slots = make_ring(2, (ROWS_PER_SLICE, 2, 3), torch.device("cpu"))
    Journey().go(CheatingHostLanes("read"), 2, slots=slots)  # skips nothing that lanes do
    stale = Journey()
    stale.go(CheatingHostLanes(verb), 2, slots=slots)
    assert stale.output.isfinite().all() and not torch.equal(stale.output, expected(26))
    poisoned = Journey()
    poisoned.go(CheatingHostLanes(verb), 2, slots=slots, poison=True)
    assert poisoned.output.isnan().all()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_read_that_leaves_a_row_out_shows_as_nan_in_that_row(lanes: Lanes, depth: int) -> None:
    journey = Journey()
    whole_read = journey.read

    def read(span, pinned_in_BSD):  # type: ignore[no-untyped-def]
        kept_BSD = pinned_in_BSD.clone()
        whole_read(span, pinned_in_BSD)
        if span.start == 8:
            pinned_in_BSD[1] = kept_BSD[1]

    journey.read = read  # type: ignore[method-assign]
    journey.go(lanes, depth, poison=True)
    bad_rows = journey.output.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert bad_rows == [9]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_work_that_leaves_its_note_out_shows_as_nan_in_the_note(lanes: Lanes, depth: int) -> None:
    journey = Journey()

    def work(span, device_in_BSD, device_out_BSD, device_note):  # type: ignore[no-untyped-def]
        device_out_BSD.copy_(device_in_BSD)

    journey.work = work  # type: ignore[method-assign]
    journey.go(lanes, depth, poison=True)
    assert torch.stack(journey.notes).isnan().all()


def test_a_ring_has_slots_of_one_shape_that_share_no_memory() -> None:
    slots = make_ring(3, (4, 5, 6), torch.device("cpu"))
    buffers = [
        getattr(slot, name)
        for slot in slots
        for name in ("pinned_in_BSD", "pinned_out_BSD", "device_in_BSD", "device_out_BSD", "pinned_note", "device_note")
    ]
    assert len({buffer.data_ptr() for buffer in buffers}) == 18
    assert {tuple(buffer.shape) for buffer in buffers} == {(4, 5, 6), (NOTE_LENGTH,)}
    assert {buffer.dtype for buffer in buffers} == {torch.float32}
    assert all(slot.owned == [] for slot in slots)


def test_each_poison_reaches_its_own_side_only() -> None:
    (slot,) = make_ring(1, (2, 3, 4), torch.device("cpu"))
    host = (slot.pinned_in_BSD, slot.pinned_out_BSD, slot.pinned_note)
    device = (slot.device_in_BSD, slot.device_out_BSD, slot.device_note)
    for buffer in (*host, *device):
        buffer.zero_()
    slot.poison_host()
    assert all(buffer.isnan().all() for buffer in host) and all((buffer == 0).all() for buffer in device)
    slot.poison_device()
    assert all(buffer.isnan().all() for buffer in device)
