"""The steps of a row: every visible pair of chunks meets once, and what is read was written, and lies apart."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rows import planned, small
from torch import Tensor

from frontier.flows.steps import Step, Steps
from frontier.layers.costs import chunk_floats
from frontier.ledger import spool_size
from frontier.planner import Plan


def faults(made: Plan, valid_BS: Tensor | None, steps: list[Step]) -> list[str]:
    """What is wrong with the steps of some rows, in words."""
    case, found = made.case, list[str]()
    valid = torch.ones(case.batch_size, case.seq_len, dtype=torch.bool) if valid_BS is None else valid_BS
    written: dict[int, tuple[int, int, int, bool]] = {}  # place: turn, row, tokens, is it keys
    chunks = list(Steps(made, valid_BS)._chunks)
    met, left, taken = list[Any](), list[Any](), list[Any]()
    for turn, step in enumerate(steps):
        if max(step.up, step.down) > len(step) or step.tokens != int(valid[step.row, step.start : step.stop].sum()):
            found.append(f"{step} moves more than it is long, or miscounts")
        if step.does == "meet":
            inside = [chunk for chunk in chunks if step.start <= chunk.start and chunk.stop <= step.stop]
            met += [(step.row, step.layer, step.chunk, c) for c in inside if valid[step.row, c.start : c.stop].any()]
            if not inside or not bool(valid[step.row, step.start : inside[-1].start].all()):
                found.append(f"{step} meets keys across a gap")
            if len(inside) > 1 and made.spool != "card":
                found.append(f"{step} meets several places of a spool at once")
        if step.does == "leave" and step.layer == case.layers - 1:
            left.append((step.row, step.chunk))
        if step.reads_at is not None:
            at, row, tokens, is_keys = written.get(step.reads_at, (turn, -1, -1, False))
            if step.after != at or at >= turn or (row, tokens) != (step.row, step.tokens):
                found.append(f"{step} reads what is not there")
            if is_keys != (step.does == "meet"):
                found.append(f"{step} takes a residual for keys")
        if step.writes_at is not None:
            is_keys = step.does != "leave"
            written[step.writes_at] = (turn, step.row, step.tokens, is_keys)
            width = case.d_model * (2 * made.recipe.working_bytes if is_keys else 4)
            taken.append((step.writes_at, step.writes_at + step.tokens * width))
            if step.down_bytes != step.tokens * width:
                found.append(f"{step} miscounts its bytes")
    rows = sorted({step.row for step in steps})
    count = {(row, chunk): int(valid[row, chunk.start : chunk.stop].sum()) for row in rows for chunk in chunks}
    wanted = {
        (row, layer, query, key)
        for row in rows for layer in range(case.layers) for query in chunks for key in chunks
        if query != key and (key < query or not case.causal) and count[row, query] and count[row, key]
    }  # fmt: skip
    if set(met) != wanted or len(met) != len(wanted):
        found.append("not every visible pair meets once")
    if left != [(row, chunk) for row in rows for chunk in chunks]:
        found.append("not every chunk leaves once, in order")
    ends = {start: max(stop for at, stop in taken if at == start) for start, _ in taken}  # rows share their places
    places, most_bytes = sorted(ends.items()), spool_size(case, made.recipe, made.spool)
    if any(a[1] > b[0] for a, b in pairwise(places)) or max(ends.values(), default=0) > most_bytes:
        found.append("places in the spool overlap or lie outside")
    return found


@given(
    st.integers(1, 40), st.integers(1, 45), st.integers(1, 3), st.booleans(), st.none() | st.floats(0, 1),
    st.sampled_from(["card", "host", "disk"]), st.integers(0, 5),
)  # fmt: skip
def test_steps_are_right_for_any_cut_and_mask(seq_len, chunk, layers, causal, share, spool, seed) -> None:  # type: ignore[no-untyped-def]
    case = small(seq_len=seq_len, layers=layers, causal=causal)
    valid_BS = None
    if share is not None:
        valid_BS = torch.rand(2, seq_len, generator=torch.Generator().manual_seed(seed)) < share
    made = planned(case, chunk, spool)
    steps = list(Steps(made, valid_BS).of([0, 1]))
    assert faults(made, valid_BS, steps) == []
    assert Steps(made, valid_BS).slot_shape == (min(chunk, seq_len), chunk_floats(case, made.recipe))
    if spool == "card":
        assert all(step.reads_at is step.writes_at is step.after is None for step in steps)


def test_a_causal_input_is_read_once_and_its_residual_never_spooled() -> None:
    made = planned(small(seq_len=40, layers=3), 7)
    steps = list(Steps(made, None).of([0]))
    reads = [step.chunk for step in steps if step.up and step.reads_at is None]
    assert reads == sorted(set(reads)) and len(reads) == 6
    assert all(step.does == "meet" for step in steps if step.reads_at is not None)
    assert not any(step.down for step in steps if step.chunk == reads[-1] and step.does == "enter")  # nobody meets it


@pytest.mark.parametrize("causal", [True, False])
def test_a_missing_doubled_or_misplaced_step_would_be_seen(causal: bool) -> None:
    made = planned(small(seq_len=33, causal=causal), 8)

    def steps() -> list[Step]:
        return list(Steps(made, None).of([0, 1]))

    whole = steps()
    meet = next(n for n, step in enumerate(whole) if step.does == "meet")
    leave = next(n for n, step in enumerate(whole) if step.does == "leave" and step.layer == 1)
    assert faults(made, None, whole) == []
    assert faults(made, None, whole[:meet] + whole[meet + 1 :])
    assert faults(made, None, whole[: meet + 1] + whole[meet:])
    assert faults(made, None, whole[:leave] + whole[leave + 1 :])
    for spoilt in ({"after": None}, {"tokens": 7}, {"reads_at": 4}):
        changed = steps()
        vars(changed[meet]).update(spoilt)
        assert faults(made, None, changed), spoilt


@given(
    st.integers(1, 40), st.integers(1, 45), st.integers(1, 4), st.booleans(), st.integers(0, 10_000), st.integers(0, 5)
)
def test_a_row_that_was_begun_comes_first_with_the_rest_of_its_steps(
    seq_len: int, chunk: int, layers: int, causal: bool, place: int, seed: int
) -> None:
    case = small(batch_size=3, seq_len=seq_len, layers=layers, causal=causal)
    valid_BS = torch.rand(3, seq_len, generator=torch.Generator().manual_seed(seed)) < 0.7
    steps = Steps(planned(case, chunk, "disk"), valid_BS)
    row = list(steps.of([1]))
    assert [step.number for step in row] == list(range(len(row)))
    begun = row[place % len(row)]
    rest = list(steps.of([0, 1, 2], begun))
    assert [(step.row, step.number) for step in rest] == [
        *((1, number) for number in range(begun.number, len(row))),
        *((other, step.number) for other in (0, 2) for step in steps.of([other])),
    ]
    assert all(step.after is None or step.after < turn for turn, step in enumerate(rest))


def written_over(spool: Any, causal: bool) -> list[str]:
    """Steps that write where an earlier step of their layer's reads from, or of what their own chunk is made of."""
    steps = list(Steps(planned(small(seq_len=33, layers=4, causal=causal), 8, spool), None).of([0]))
    reads = {(step.layer, step.reads_at) for step in steps if step.reads_at is not None and step.does != "meet"}
    return [str(step) for step in steps if step.does == "leave" and (step.layer, step.writes_at) in reads]


def test_in_a_file_no_residual_is_written_over_the_one_that_it_is_made_of() -> None:
    assert written_over("disk", False) == [] and written_over("disk", True) == []
    assert written_over("host", False), "in memory they are: nobody goes on from there"
