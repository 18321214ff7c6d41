"""Talk goes to stderr: lines now and then, a bar on a terminal, nothing when quiet."""

import sys

import pytest

from referee import progress as room
from referee.progress import Progress


def work(quiet: bool) -> None:
    progress = Progress(quiet)
    progress.start(100.0)
    for _ in range(4):
        progress.tick(25.0)
    progress.say("done")
    progress.close()


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LINE_EVERY_S", 0.0)
    work(quiet=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line[:9] for line in shown.err.splitlines()] == ["25% done,", "50% done,", "75% done,", "100% done", "done"]


def test_lines_do_not_come_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    work(quiet=False)
    assert capsys.readouterr().err == "done\n"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LINE_EVERY_S", 0.0)
    work(quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    work(quiet=False)
    assert "%|" in capsys.readouterr().err
