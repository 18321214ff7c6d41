"""The script that measures errors by number of chunks: flat as things are, and it sees one that grows."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import frontier.layers.chunk as chunk_module
from frontier.layers.merge import merge
from frontier.record import Record
from frontier.report.markdown import results_text

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chunk_error.py"


@pytest.fixture(scope="module")
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    return script_of("chunk_error")


def measured(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    words = ["--device", "cpu", "--seq-len", "128", "--d-model", "32", "fp32/packed/flash"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return int(str(ended.value.code)), capsys.readouterr().out


def test_the_error_is_flat_and_stands_in_the_results(script, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    code, line = measured(script, capsys, monkeypatch)
    record = Record.from_json(line)
    assert code == 0 and record.kind == "chunk-error" and list(record.notes["errors"]) == ["1", "2", "8", "64"]
    assert all(0 < error["rms"] < 1e-6 for error in record.notes["errors"].values())
    text = results_text([record])
    assert "### Error against the number of chunks" in text
    assert f"| fp32/packed/flash | {record.notes['errors']['1']['rms']:.3g} (0.000) |" in text


def test_running_sums_in_half_precision_would_be_seen(script, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def in_half(out_CHK: torch.Tensor, *rest: torch.Tensor) -> None:
        merge(out_CHK, *rest)
        out_CHK.copy_(out_CHK.half())

    monkeypatch.setattr(chunk_module, "merge", in_half)
    code, line = measured(script, capsys, monkeypatch)
    assert code == 1 and Record.from_json(line).notes["grew"] == ["2", "8", "64"]
