"""What progress says where there is no terminal: rows with their bytes, or positions of chunked rows without."""

import pytest

import frontier.stream.progress as progress_module
from frontier.spans import Span
from frontier.stream.progress import Progress
from frontier.stream.trace import Event


def said(progress: Progress, capsys: pytest.CaptureFixture[str]) -> list[str]:
    for span in (Span(0, 3), Span(3, 4)):
        for verb in ("read", "write"):
            progress(Event(verb, span, 0.0, 1.0))  # type: ignore[arg-type]
    progress.close()
    return capsys.readouterr().err.splitlines()


def test_rows_and_positions_are_counted_as_they_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    rows = said(Progress(4, 1 << 20), capsys)
    assert rows[0].startswith("3 of 4 rows, ") and "3.00 MiB out, " in rows[0] and rows[1].startswith("4 of 4 rows, ")
    positions = said(Progress(4, 0, unit="position"), capsys)
    assert positions[1].startswith("4 of 4 positions, ") and " positions/s, " in positions[1]
    assert "out" not in positions[1] and positions[1].endswith(" left")
    assert said(Progress(4, 1 << 20, quiet=True), capsys) == []
