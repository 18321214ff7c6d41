"""A part of a row is what the whole row has there, from every source and into every sink, however it is cut."""

import numpy as np
import pytest
import torch
from input_files import save
from output_files import names, saved_bytes
from safetensors.torch import load_file, save_file

from frontier.data.files import open_source
from frontier.data.generate import SeededSource
from frontier.data.hashing import row_hash
from frontier.data.resident import ResidentSource
from frontier.data.sinks import FileSink, MemorySink
from frontier.spans import Span, cut

SOURCES = {
    "seeded": lambda folder, case: SeededSource(case, 2),
    "a file": lambda folder, case: open_source(folder / "x.npy", case, threads=2),
    "resident": lambda folder, case: ResidentSource(SeededSource(case, 2), case, 2),
}


class Told:
    """Stands for a journal."""

    def __init__(self) -> None:
        self.rows: list[Span] = []
        self.closed = False

    def add(self, rows: Span) -> None:
        self.rows.append(rows)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("chunk", [1000, 4096, 4999, 5000])
@pytest.mark.parametrize("kind", SOURCES)
def test_parts_of_a_row_make_the_row(tmp_path, make_case, kind, chunk):
    case = make_case(seq_len=5000)
    save(tmp_path / "x.npy", torch.randn(3, 5000, 6))
    source = SOURCES[kind](tmp_path, case)
    whole_BSD, parts_BSD = torch.empty(3, 5000, 6), torch.full((3, 5000, 6), float("nan"))
    source.read(Span(0, 3), whole_BSD)
    for row in range(3):
        for positions in cut(5000, chunk):
            source.read(Span(row, row + 1), parts_BSD[row : row + 1, positions.as_slice()], positions)
    source.close()
    assert torch.equal(parts_BSD, whole_BSD)
    assert not torch.equal(parts_BSD, whole_BSD.roll(1, 1))


@pytest.mark.parametrize("chunk", [7, 16, 39, 40])
def test_parts_of_rows_make_the_file_that_numpy_saves_and_a_row_is_told_when_it_is_whole(tmp_path, case, y_BSD, chunk):
    sink, told = FileSink(tmp_path / "y.npy", case), Told()
    sink.tell(told)
    memory = MemorySink(case)
    for row in range(3):
        for positions in cut(40, chunk):
            assert told.rows == [Span(done, done + 1) for done in range(row)]
            for keeper in (sink, memory):
                keeper.write(Span(row, row + 1), y_BSD[row : row + 1, positions.as_slice()].contiguous(), positions)
    assert [sink.row_hash(row) for row in range(2)] == [row_hash(y_BSD[row], sink._pool) for row in range(2)]
    sink.finish()
    assert told.closed
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)
    assert torch.equal(memory.host_BSD, y_BSD)


def test_a_row_with_a_part_missing_is_not_whole(tmp_path, case, y_BSD, refusal):
    sink = FileSink(tmp_path / "y.npy", case)
    sink.write(Span(0, 2), y_BSD[:2])
    sink.write(Span(2, 3), y_BSD[2:, :30].contiguous(), Span(0, 30))
    assert "rows 0-1 of 3 are whole" in refusal(sink.finish)[0]
    sink.write(Span(2, 3), y_BSD[2:, 30:].contiguous(), Span(30, 40))
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


@pytest.mark.parametrize(
    ("rows", "shape", "positions"),
    [
        (Span(0, 2), (2, 10, 6), Span(0, 10)),
        (Span(0, 1), (1, 10, 6), Span(35, 45)),
        (Span(0, 1), (1, 10, 6), Span(0, 9)),
        (Span(0, 1), (1, 0, 6), Span(5, 5)),
    ],
)
def test_parts_that_are_none_of_the_rows_are_our_own_mistake(tmp_path, case, rows, shape, positions):
    with pytest.raises(AssertionError):
        MemorySink(case).write(rows, torch.zeros(shape), positions)


def test_an_output_is_the_safetensors_file_that_its_own_package_saves(tmp_path, case, y_BSD):
    sink = FileSink(tmp_path / "y.safetensors", case)
    for row in (1, 0, 2):
        sink.write(Span(row, row + 1), y_BSD[row : row + 1])
    sink.finish()
    assert names(tmp_path) == ["y.safetensors"]
    save_file({"y": y_BSD}, tmp_path / "wanted.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "wanted.safetensors").read_bytes()
    assert torch.equal(load_file(tmp_path / "y.safetensors")["y"], y_BSD)
    source, again_BSD = open_source(tmp_path / "y.safetensors", case), torch.empty(3, 40, 6)
    source.read(Span(0, 3), again_BSD)
    source.close()
    assert torch.equal(again_BSD, y_BSD)


def test_a_part_without_a_header_holds_nothing_and_is_taken(tmp_path, case, y_BSD):
    """A run that is killed while its space is reserved leaves one."""
    for left in (b"", bytes(3008)):
        (tmp_path / "y.npy.partial").write_bytes(left)
        sink = FileSink(tmp_path / "y.npy", case)
        assert not any((tmp_path / "y.npy.partial").read_bytes()), "a header before the first row"
        sink.write(Span(0, 3), y_BSD)
        sink.finish()
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), y_BSD.numpy())
        (tmp_path / "y.npy").unlink()
