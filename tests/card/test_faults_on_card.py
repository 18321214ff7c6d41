"""A card whose memory really runs out part-way: a sentence, nothing held, and the run goes on to the same bytes."""

from pathlib import Path

import pytest
import torch

from frontier.case import Case
from frontier.data.sinks import FileSink
from frontier.errors import DoesNotFit
from frontier.flows.whole import WholeRows
from frontier.machine import Machine
from frontier.planner import Keeping, Plan, plan
from frontier.recipe import REFERENCE, parse_recipe
from frontier.rundir import RunDir
from frontier.runner import Choices, run
from frontier.stream import journal
from frontier.units import GIB

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(journal, "MOST_S", 0.0)
    machine = Machine.detect("cuda", device_budget_bytes=8 * GIB)
    machine.limit_allocator()
    case = Case.load("14").override(batch_size=6, seq_len=3000)
    return plan(case, machine, parse_recipe("fp16/packed/cudnn", REFERENCE), Keeping(output="file"), slice_rows=1)


def start(planned: Plan, folder: Path, *, resume: bool = False) -> bytes:
    output = folder / "y.npy"
    with RunDir(folder / "kept", resume=resume) as kept:
        claims = kept.claims(planned, {"kind": "seeded"}, str(output.resolve())) if resume else None
        sink = FileSink(output, planned.case, claimed=None if claims is None else claims.row_sha256)
        record = run(planned, sink=sink, run_dir=kept, choices=Choices(watch=(0,)), output="file")
    assert record.kind == ("resumed" if resume else "run")
    return output.read_bytes()


def test_memory_that_runs_out_part_way_is_a_sentence_and_the_run_goes_on(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "undisturbed").mkdir()
    wanted = start(planned, tmp_path / "undisturbed")
    true_work, turns = WholeRows.work, iter(range(100))

    def hungry(self: WholeRows, rows: object, device_in_BSD: torch.Tensor, *buffers: torch.Tensor) -> None:
        if next(turns) == 3:
            # More than the allocator may have.
            torch.empty(int(8 * GIB), dtype=torch.uint8, device=device_in_BSD.device)
        true_work(self, rows, device_in_BSD, *buffers)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(WholeRows, "work", hungry)
        with pytest.raises(DoesNotFit, match="the card ran out of memory"):
            start(planned, tmp_path)
    assert not (tmp_path / "y.npy").exists() and (tmp_path / "y.npy.partial").exists()
    assert torch.cuda.memory_allocated() < GIB, "the slots are held for ever"
    assert start(planned, tmp_path, resume=True) == wanted
