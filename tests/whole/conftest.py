"""Every test of this room works in a folder of its own, with slices short enough that small cases have several."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from frontier import planner


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)  # many runs of small matrices, which on several threads only wait for each other
    monkeypatch.chdir(tmp_path)
    # Two rows of 150 positions: the small case is three slices, the last one short.
    monkeypatch.setattr(planner, "USUAL_SLICE_TOKENS", {True: 300, False: 300})
    yield tmp_path
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)
