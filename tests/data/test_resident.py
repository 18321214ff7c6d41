"""A resident source gives the bytes and the description of the source it was made from."""

import numpy as np
import pytest
import torch

from frontier.data import memory
from frontier.data.files import open_source
from frontier.data.generate import SeededSource
from frontier.data.resident import ResidentSource
from frontier.spans import Span, cut


class Counted:
    """Lends a source, and counts what is asked of it."""

    def __init__(self, source) -> None:
        self._source, self.reads, self.closed = source, [], 0

    def read(self, rows, into_BSD):
        self.reads.append(rows)
        self._source.read(rows, into_BSD)

    def describe(self):
        return self._source.describe()

    def close(self):
        self.closed += 1
        self._source.close()


def read_in_cuts(source, case, rows_per_read: int) -> torch.Tensor:
    whole = torch.full((case.batch_size, case.seq_len, case.d_model), float("nan"))
    for rows in cut(case.batch_size, rows_per_read):
        source.read(rows, whole[rows.as_slice()])
    return whole


@pytest.mark.parametrize("kind", ["seeded", "file"])
@pytest.mark.parametrize("rows_per_read", [1, 2, 5])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 23])
def test_a_resident_source_gives_the_same_bytes_and_description(
    tmp_path, make_case, monkeypatch, kind, rows_per_read, piece_bytes
):
    monkeypatch.setattr(memory, "PIECE_BYTES", piece_bytes)
    case = make_case(batch_size=5, seq_len=300)
    x_BSD = np.random.default_rng(1).standard_normal((5, 300, 6), dtype=np.float32)
    np.save(tmp_path / "x.npy", x_BSD)
    inner = SeededSource(case, 2) if kind == "seeded" else open_source(tmp_path / "x.npy", case)
    source = ResidentSource(inner, case, 2)
    found = read_in_cuts(source, case, rows_per_read)
    assert torch.equal(found, read_in_cuts(inner, case, 5)) and not torch.equal(found, found.flip(0))
    assert torch.equal(found, torch.from_numpy(x_BSD)) == (kind == "file")
    assert source.describe() == inner.describe() and source.describe()["kind"] == kind
    source.close()


def test_the_source_is_read_once_and_closed_with_the_resident_one(make_case):
    case = make_case(batch_size=5, seq_len=100)
    counted = Counted(SeededSource(case, 2))
    source = ResidentSource(counted, case, 2)
    for rows_per_read in (1, 2, 5):
        read_in_cuts(source, case, rows_per_read)
    assert counted.reads == [Span(0, 5)] and counted.closed == 0
    source.close()
    assert counted.closed == 1
    with pytest.raises(RuntimeError):
        counted.read(Span(0, 1), torch.empty(1, 100, 6))


def test_the_caller_gets_a_copy_of_the_kept_rows(make_case):
    case = make_case(batch_size=5, seq_len=100)
    source = ResidentSource(SeededSource(case, 2), case, 2)
    before = read_in_cuts(source, case, 5)
    into_BSD = torch.empty(1, 100, 6)
    source.read(Span(3, 4), into_BSD)
    assert torch.equal(into_BSD, before[3:4]) and into_BSD.any()
    into_BSD.zero_()
    assert torch.equal(read_in_cuts(source, case, 2), before)
    source.close()


def test_a_file_that_is_lost_on_the_way_into_memory_is_refused(tmp_path, case, refusal):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 40, 6), np.float32))
    inner = open_source(path, case)
    path.unlink()
    assert refusal(ResidentSource, inner, case, 2) == (
        f"{path} changed while we ran: it cannot be found any more: No such file or directory",
        "run again on a file that nothing else writes to",
    )


def test_a_file_that_changes_afterwards_is_told_at_closing_and_does_no_harm_before(tmp_path, case, refusal):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 40, 6), np.float32))
    source = ResidentSource(open_source(path, case), case, 2)
    np.save(path, np.ones((4, 40, 6), np.float32))
    assert not read_in_cuts(source, case, 2).any()
    assert refusal(source.close) == (
        f"{path} changed while we ran: 3,008 bytes when opened, 3,968 now",
        "run again on a file that nothing else writes to",
    )


@pytest.mark.parametrize(("rows", "shape"), [(Span(2, 4), (2, 40, 6)), (Span(0, 2), (1, 40, 6))])
def test_rows_that_are_not_the_cases_are_our_own_mistake(case, rows, shape):
    source = ResidentSource(SeededSource(case, 1), case, 1)
    with pytest.raises(AssertionError):
        source.read(rows, torch.empty(shape))
    source.read(Span(0, 1), torch.empty(1, 40, 6))
    source.close()
