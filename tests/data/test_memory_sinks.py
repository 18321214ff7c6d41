"""Sinks without a file keep copies or nothing, and no sink takes rows that are not the case's."""

import pytest
import torch
from output_files import write_all

from frontier.data.sinks import FileSink, MemorySink, NullSink
from frontier.spans import Span


def test_a_memory_sink_keeps_copies_and_shows_what_was_never_written(case, y_BSD):
    sink = MemorySink(case, threads=2)
    assert sink.host_BSD.isnan().all()
    lent_BSD = y_BSD[1:].clone()
    sink.write(Span(1, 3), lent_BSD)
    lent_BSD.zero_()
    assert torch.equal(sink.host_BSD[1:], y_BSD[1:]) and sink.host_BSD[0].isnan().all()
    sink.finish()
    write_all(sink, y_BSD + 1)
    assert torch.equal(sink.host_BSD, y_BSD + 1)
    assert sink.abandon() == "the output was in memory and is gone"


def test_a_null_sink_takes_all_and_keeps_none(y_BSD):
    sink = NullSink()
    write_all(sink, y_BSD)
    sink.finish()
    assert sink.abandon() == "no output was kept"
    assert vars(sink) == {}


@pytest.mark.parametrize("make_sink", [MemorySink, lambda case: FileSink("y.npy", case)])
def test_rows_that_are_not_the_cases_are_our_own_mistake(tmp_path, case, y_BSD, monkeypatch, make_sink):
    monkeypatch.chdir(tmp_path)
    sink = make_sink(case)
    for rows, host_BSD in (
        (Span(1, 4), y_BSD),
        (Span(0, 2), y_BSD),
        (Span(0, 3), y_BSD.double()),
        (Span(0, 3), y_BSD.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        with pytest.raises(AssertionError):
            sink.write(rows, host_BSD)
    write_all(sink, y_BSD)
    sink.abandon()
