"""The scripts that measure a card say so where there is none, and leave no file behind."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.mark.parametrize("name", ["host_time", "probe_cuts", "probe_wide"])
def test_a_probe_of_a_card_is_refused_without_one(
    script_of: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [name, "--output", str(tmp_path / "out.jsonl"), "2"])
    with pytest.raises(SystemExit) as refused:
        script_of(name).main()
    assert refused.value.code == 2
    assert "finds no CUDA card here, and this measures one" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99", "--output", "out.jsonl"], "no case `99`: name shipped ones"),
        (["2", "--output", "missing/out.jsonl"], "name a file in a folder that exists"),
    ],
)
def test_first_results_look_at_their_arguments_before_they_measure(
    script_of: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["first_results", *words])
    with pytest.raises(SystemExit) as refused:
        script_of("first_results").main()
    assert refused.value.code == 2 and said in capsys.readouterr().err
