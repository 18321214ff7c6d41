"""An output bears its name only when it is whole, and one that is stopped early says what is safe."""

import os

import pytest
import torch
from output_files import names, saved_bytes, write_all

from frontier.data import sinks
from frontier.data.sinks import FileSink
from frontier.errors import DataError
from frontier.spans import Span, cut


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("piece_bytes", [100, 1 << 24])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2)])
def test_rows_in_any_order_make_the_file_that_numpy_saves(
    tmp_path, case, y_BSD, monkeypatch, order, piece_bytes, threads
):
    monkeypatch.setattr(sinks, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "y.npy"
    sink = FileSink(path, case, threads=threads)
    for row in order:
        sink.write(Span(row, row + 1), y_BSD[row : row + 1])
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert path.read_bytes() != saved_bytes(y_BSD.flip(0))
    assert names(tmp_path) == ["y.npy"]


def test_the_tensor_may_be_reused_as_soon_as_write_returns(tmp_path, case, y_BSD):
    sink = FileSink(tmp_path / "y.npy", case)
    lent_BSD = torch.empty(2, 40, 6)
    for rows in cut(3, 2):
        lent_BSD[: len(rows)] = y_BSD[rows.as_slice()]
        sink.write(rows, lent_BSD[: len(rows)])
        lent_BSD.fill_(float("nan"))
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_second_pass_writes_the_same_file_anew(tmp_path, case, y_BSD):
    sink = FileSink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD + 1)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD) != saved_bytes(y_BSD + 1)


def test_the_name_is_there_only_when_the_file_is_whole(tmp_path, case, y_BSD):
    sink = FileSink(tmp_path / "y.npy", case)
    assert names(tmp_path) == ["y.npy.partial"]
    assert (tmp_path / "y.npy.partial").stat().st_size == len(saved_bytes(y_BSD)), "no space was reserved"
    write_all(sink, y_BSD)
    assert names(tmp_path) == ["y.npy.partial"]
    sink.finish()
    assert names(tmp_path) == ["y.npy"]


def test_short_writes_are_gone_on_with(tmp_path, case, y_BSD, monkeypatch):
    real_pwrite, calls = os.pwrite, []

    def short_pwrite(fd, data, offset):
        calls.append(offset)
        return real_pwrite(fd, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    sink = FileSink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)
    assert len(calls) > len(saved_bytes(y_BSD)) // 7


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([], "no row of 3 is whole"),
        ([Span(1, 2)], "row 1 of 3 is whole"),
        ([Span(0, 2)], "rows 0-1 of 3 are whole"),
        ([Span(2, 3), Span(0, 1)], "rows 0, 2 of 3 are whole"),
    ],
)
def test_an_output_with_a_row_never_written_is_not_finished(tmp_path, case, y_BSD, refusal, written, missing):
    path = tmp_path / "y.npy"
    sink = FileSink(path, case)
    for rows in written:
        sink.write(rows, y_BSD[rows.as_slice()])
    assert refusal(sink.finish) == (
        f"{path} is not whole: {missing} in y.npy.partial",
        "run again; rows that are whole stay where they are until then",
    )
    assert names(tmp_path) == ["y.npy.partial"]
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


@pytest.mark.parametrize(
    ("written", "sentence", "left"),
    [
        ([], "no row is whole, y.npy.partial is removed", []),
        ([Span(2, 3)], "row 2 of 3 is whole in y.npy.partial", ["y.npy.partial"]),
        ([Span(1, 3)], "rows 1-2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
        ([Span(0, 1), Span(2, 3)], "rows 0, 2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
        ([Span(0, 3)], "rows 0-2 of 3 are whole in y.npy.partial", ["y.npy.partial"]),
    ],
)
def test_abandoning_says_what_is_safe_and_where(tmp_path, case, y_BSD, written, sentence, left):
    sink = FileSink(tmp_path / "y.npy", case)
    for rows in written:
        sink.write(rows, y_BSD[rows.as_slice()])
    assert sink.abandon() == sentence
    assert sink.abandon() == sentence
    assert names(tmp_path) == left
    for rows in written:
        kept = (tmp_path / "y.npy.partial").read_bytes()[128:]
        assert kept[rows.start * 960 : rows.stop * 960] == y_BSD[rows.as_slice()].numpy().tobytes()


def test_abandoning_a_finished_output_leaves_it_whole(tmp_path, case, y_BSD):
    sink = FileSink(tmp_path / "y.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert sink.abandon() == "y.npy is whole"
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_sink_of_any_end_leaves_no_file_open(tmp_path, case, y_BSD):
    before = set(os.listdir("/proc/self/fd"))
    for ending in ("finish", "abandon"):
        sink = FileSink(tmp_path / "y.npy", case, overwrite=True)
        write_all(sink, y_BSD)
        assert set(os.listdir("/proc/self/fd")) > before
        getattr(sink, ending)()
        assert set(os.listdir("/proc/self/fd")) == before
    for _ in range(2):
        with pytest.raises(DataError):
            FileSink(tmp_path / "y.npy", case)
    assert set(os.listdir("/proc/self/fd")) == before
