"""Parts of a row are claimed before anything they need is written over, each with the hash of what it wrote."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rows import holes, planned, small

from frontier.data.generate import SeededSource
from frontier.data.sinks import FileSink
from frontier.flows.chunked import ChunkedRows
from frontier.flows.engine import Engine
from frontier.flows.parts import Parts
from frontier.flows.steps import Step
from frontier.layers.weights import seeded_state
from frontier.spans import Span
from frontier.stream.journal import Part


class Told:
    """Stands for a journal that claims only when it must."""

    def __init__(self) -> None:
        self.waiting = list[Callable[[], Part]]()
        self.claimed = list[Part]()

    def add(self, news: Any) -> None:
        if not isinstance(news, Span):
            self.waiting.append(news)

    def settle(self) -> None:
        self.claimed += [hashed() for hashed in self.waiting]
        self.waiting.clear()

    def close(self) -> None:
        """Nothing was opened."""


def carried(
    folder: Path, causal: bool, monkeypatch: pytest.MonkeyPatch, masked: bool = False
) -> tuple[Told, list[str]]:
    """A pass of two rows with four chunks, and what was wrong with its writes."""
    case, told, faults = small(layers=3, causal=causal), Told(), list[str]()
    held: dict[int, int] = {}  # place in the spool: row, of what is there and not claimed
    true_write = Parts.will_write

    def will_write(self: Parts, step: Step) -> None:
        true_write(self, step)
        if not told.waiting:
            held.clear()
        if step.writes_at is not None and step.writes_at in held:
            faults.append(f"{step} writes over what is not claimed")
        if step.writes_at is not None:
            held[step.writes_at] = step.row

    monkeypatch.setattr(Parts, "will_write", will_write)
    sink, source = FileSink(folder / "y.npy", case), SeededSource(case, 2)
    made = planned(case, 9, "disk")
    with Engine(made, seeded_state(case), holes(case) if masked else None, folder / "spool.bin") as engine:
        assert isinstance(engine.flow, ChunkedRows)
        parts = engine.flow.keep_parts(sink)
        assert parts is not None
        parts.journal = told  # type: ignore[assignment]
        sink.tell(told)
        engine.run_pass(source, sink)
        told.settle()
    sink.finish()
    source.close()
    return told, faults


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_nothing_unclaimed_is_written_over_and_parts_follow_one_another(
    causal: bool, masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, faults = carried(tmp_path, causal, monkeypatch, masked)
    assert faults == []
    for row in range(2):
        steps = [part.step for part in told.claimed if part.row == row]
        assert len(steps) > 3 and steps == sorted(set(steps))
    (tmp_path / "again").mkdir()
    again, _ = carried(tmp_path / "again", causal, monkeypatch, masked)
    assert told.claimed == again.claimed, "hashes are of what was written, which is the same"
    assert len({part.sha256 for part in told.claimed}) > len(told.claimed) // 2


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_claims_that_do_not_settle_would_be_seen(causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, calls = Told.settle, list[None]()
    monkeypatch.setattr(Told, "settle", lambda self: calls.append(None) if len(calls) < 99 else settle(self))
    _, faults = carried(tmp_path, causal, monkeypatch)
    assert faults
