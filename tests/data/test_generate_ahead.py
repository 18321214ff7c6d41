"""Parts of seeded rows are drawn ahead: the same bytes in any order, each once in order, within bounds; no hanging."""

import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontier.case import Case
from frontier.data import generate
from frontier.data.generate import SeededSource
from frontier.spans import Span, cut

BLOCK, ROWS, SEQ_LEN, WIDTH = 4096, 3, 5 * 4096 + 700, 2
CASE = Case(name="small", batch_size=ROWS, seq_len=SEQ_LEN, d_model=WIDTH, heads=1, ffn_dim=2, layers=1)
CHUNKS = [1000, BLOCK, 5000, 2 * BLOCK, 3 * BLOCK + 1, SEQ_LEN]


@pytest.fixture(scope="module", name="whole_BSD")
def whole_rows() -> torch.Tensor:
    source, whole_BSD = SeededSource(CASE, 2), torch.empty(ROWS, SEQ_LEN, WIDTH)
    source.read(Span(0, ROWS), whole_BSD)
    source.close()
    return whole_BSD


def read_part(source: SeededSource, row: int, positions: Span) -> torch.Tensor:
    into_BSD = torch.full((1, len(positions), WIDTH), float("nan"))
    source.read(Span(row, row + 1), into_BSD, positions)
    return into_BSD[0]


class Drawing:
    """Stands for `fill_block`: counts, fails where it is told to, and waits for `gate`."""

    def __init__(self) -> None:
        self.count: Counter[tuple[int, int]] = Counter()
        self.places: set[int] = set()  # memory that was drawn into
        self.failing: set[tuple[int, int]] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._fill = generate.fill_block

    def __call__(self, case: Case, row: int, block: int, into_SD: torch.Tensor) -> None:
        self.count[row, block] += 1
        self.places.add(into_SD.untyped_storage().data_ptr())
        assert self.gate.wait(60)
        if (row, block) in self.failing:
            raise MemoryError("planted")
        self._fill(case, row, block, into_SD)


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Drawing:
    counted = Drawing()
    monkeypatch.setattr(generate, "fill_block", counted)
    return counted


def settle(source: SeededSource) -> None:
    """Wait for all that is drawn ahead."""
    for future, _ in source._ahead.values():
        future.exception(60)


def read_in_order(chunk: int) -> list[tuple[int, Span]]:
    return [(row, positions) for row in range(ROWS) for positions in cut(SEQ_LEN, chunk)]


ORDERS = {
    "in order": lambda parts: parts,
    "backward": lambda parts: parts[::-1],
    "each twice": lambda parts: [part for part in parts for _ in range(2)],
    "rows in two sweeps": lambda parts: [part for turn in range(6) for part in parts if part[0] == turn // 2],
    "a row done": lambda parts: [part for part in parts if part[0] != 1],
    "a row resumed": lambda parts: parts[len(parts) // 2 :] + parts[: len(parts) // 2],
    "every other": lambda parts: parts[::2],
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_parts_gives_the_rows(whole_BSD, order, chunk, threads):
    source = SeededSource(CASE, threads)
    for row, positions in ORDERS[order](read_in_order(chunk)):
        assert torch.equal(read_part(source, row, positions), whole_BSD[row, positions.as_slice()]), (row, positions)
    source.close()
    assert not torch.equal(whole_BSD[0], whole_BSD[1])


bounds = st.lists(st.integers(0, SEQ_LEN), min_size=2, max_size=2, unique=True).map(sorted)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, ROWS - 1), st.none() | bounds), max_size=8))
def test_any_parts_and_whole_rows_between_them_give_the_rows(whole_BSD, threads, wanted):
    source = SeededSource(CASE, threads)
    for row, span in wanted:
        positions = None if span is None else Span(*span)
        into_BSD = torch.full((1, SEQ_LEN if positions is None else len(positions), WIDTH), float("nan"))
        source.read(Span(row, row + 1), into_BSD, positions)
        assert torch.equal(into_BSD[0], whole_BSD[row, slice(None) if positions is None else positions.as_slice()])
    source.close()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_pass_in_order_draws_each_block_once(drawing, chunk, threads, keeps):
    source = SeededSource(CASE, threads)
    for row, positions in read_in_order(chunk):
        read_part(source, row, positions)
        if not keeps:  # the control: the block that the next read begins with is forgotten
            settle(source)
            source._ahead.pop(row * 6 + positions.stop // BLOCK if positions.stop < SEQ_LEN else -1, None)
    source.close()
    assert drawing.count.keys() == {(row, block) for row in range(ROWS) for block in range(6)}
    once = set(drawing.count.values()) == {1}
    assert once if keeps else once == (chunk == SEQ_LEN)


def test_the_next_blocks_are_drawn_while_nobody_reads(drawing):
    source = SeededSource(CASE, 4)
    read_part(source, 0, Span(0, 2 * BLOCK))
    settle(source)
    assert drawing.count.keys() == {(0, block) for block in range(6)}, "two read, four ahead"
    drawing.failing = {(0, 2), (0, 3)}  # would be seen if they were drawn again
    read_part(source, 0, Span(2 * BLOCK, 4 * BLOCK))
    settle(source)
    assert drawing.count.keys() == {(0, block) for block in range(6)} | {(1, 0), (1, 1)}, "then the next row"
    source.close()


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_no_more_lies_ahead_than_threads_draw_or_a_row_holds(drawing, order, threads):
    source, most, into_BSD = SeededSource(CASE, threads), min(threads, 5), torch.empty(1, SEQ_LEN, WIDTH)
    for chunk in CHUNKS:
        for row, positions in ORDERS[order](read_in_order(chunk)):
            source.read(Span(row, row + 1), into_BSD[:, : len(positions)], positions)
            assert len(source._ahead) + len(source._free) <= most
    # All memory that was ever drawn into: the caller's, and what is used again and again.
    assert len(drawing.places - {into_BSD.untyped_storage().data_ptr()}) <= most
    assert most * BLOCK * WIDTH * 4 <= CASE.row_bytes
    source.close()
    assert not source._ahead and not source._free


@pytest.mark.parametrize("chunk", [1000, BLOCK, 2 * BLOCK, SEQ_LEN])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_failing_draw_surfaces_in_the_read_that_wants_it(drawing, whole_BSD, threads, chunk):
    source, drawing.failing = SeededSource(CASE, threads), {(1, 3)}
    for row, positions in read_in_order(chunk):
        if row == 1 and positions.stop > 3 * BLOCK:
            break
        read_part(source, row, positions)
    for _ in range(2):
        with pytest.raises(MemoryError, match="planted"):
            read_part(source, row, positions)
    drawing.failing = set()
    assert torch.equal(read_part(source, row, positions), whole_BSD[row, positions.as_slice()]), "it is drawn anew"
    drawing.failing = {(2, 0), (2, 1)}
    read_part(source, 1, Span(SEQ_LEN - 1, SEQ_LEN))  # what fails ahead and is never wanted is nobody's error
    source.close()


def test_closing_in_the_midst_ends_all_threads_and_drops_what_lies_ahead(drawing):
    before = set(threading.enumerate())
    source = SeededSource(CASE, 3)
    read_part(source, 0, Span(0, 10))
    drawing.gate.clear()
    reader = threading.Thread(target=read_part, args=(source, 2, Span(5, 9000)))
    reader.start()
    while not source._lock.locked():  # it reads, and waits for the gate
        time.sleep(0.001)
    closer = threading.Thread(target=source.close)
    closer.start()
    drawing.gate.set()
    for thread in (reader, closer):
        thread.join(60)
    assert set(threading.enumerate()) <= before and not source._ahead and not source._free
    with pytest.raises(RuntimeError):
        read_part(source, 0, Span(0, 10))
    source.close()
