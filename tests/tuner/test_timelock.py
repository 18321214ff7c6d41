"""While one times on a device, nobody else computes there: across processes and threads, until the holder dies."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from frontier import timelock
from frontier.errors import DataError, InUse
from frontier.machine import Machine
from frontier.timelock import timing_window, using_card


@pytest.fixture(autouse=True)
def own_folder(own_locks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelock, "folder", lambda: tmp_path)


CPU = Machine.detect("cpu")
HOLD = """
import sys, time
from pathlib import Path
from frontier import timelock
from frontier.machine import Machine
timelock.folder = lambda: Path(sys.argv[2])
with getattr(timelock, sys.argv[1])(Machine.detect("cpu")):
    print("held", flush=True)
    sys.stdin.read()
"""


class Holder:
    """Another process that holds the lock until it is told to go, or is killed."""

    def __init__(self, how: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, how, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=20)


def is_free(how: str) -> bool:
    try:
        with getattr(timelock, how)(CPU):
            return True
    except InUse:
        return False


@pytest.mark.parametrize(
    ("held", "wanted", "free"),
    [
        ("timing_window", "timing_window", False),
        ("timing_window", "using_card", False),
        ("using_card", "timing_window", False),
        ("using_card", "using_card", True),
    ],
)
def test_who_times_is_alone_and_who_computes_is_not(tmp_path: Path, held: str, wanted: str, free: bool) -> None:
    holder = Holder(held, tmp_path)
    try:
        assert is_free(wanted) is free
    finally:
        holder.end()
    assert is_free(wanted)


def test_the_error_names_the_holder_and_what_to_do(tmp_path: Path) -> None:
    holder = Holder("timing_window", tmp_path)
    try:
        with pytest.raises(InUse) as caught, using_card(CPU):
            pass
    finally:
        holder.end()
    assert f"process {holder.process.pid} (`-c timing_window " in str(caught.value)
    assert "times on this device (frontier-cpu.lock): nothing may be computed meanwhile" in str(caught.value)
    assert "wait" in str(caught.value.hint) and caught.value.exit_code == 3


def test_a_killed_holder_holds_nothing_and_is_not_named_again(tmp_path: Path) -> None:
    killed = Holder("using_card", tmp_path)
    killed.end(kill=True)
    holder = Holder("using_card", tmp_path)
    try:
        with pytest.raises(InUse) as caught, timing_window(CPU):
            pass
    finally:
        holder.end()
    assert str(holder.process.pid) in str(caught.value) and str(killed.process.pid) not in str(caught.value)
    assert is_free("timing_window")


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    with timing_window(CPU):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
    try:
        assert is_free("timing_window")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_the_holder_itself_may_compute_but_another_thread_of_it_may_not() -> None:
    found = []
    with timing_window(CPU):
        with using_card(CPU), timing_window(CPU):
            pass
        thread = threading.Thread(target=lambda: found.append(is_free("using_card")))
        thread.start()
        thread.join()
        assert not is_free_elsewhere()
    assert found == [False] and is_free_elsewhere()


def is_free_elsewhere() -> bool:
    found = []
    thread = threading.Thread(target=lambda: found.append(is_free("using_card")))
    thread.start()
    thread.join()
    return found[0]


def test_work_that_others_may_share_never_becomes_a_timing_window() -> None:
    with using_card(CPU), pytest.raises(InUse, match="may share"), timing_window(CPU):
        pass


def test_a_folder_that_takes_no_lock_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelock, "folder", lambda: tmp_path / "none")
    with (
        pytest.raises(DataError, match=r"frontier-cpu\.lock cannot be opened: No such file") as caught,
        using_card(CPU),
    ):
        pass
    assert "TMPDIR" in str(caught.value.hint)


def test_an_error_inside_lets_go() -> None:
    with pytest.raises(ZeroDivisionError), timing_window(CPU):
        raise ZeroDivisionError
    assert is_free_elsewhere()


def test_a_lock_file_of_another_user_can_be_locked_though_not_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "frontier-cpu.lock"
    path.write_text('{"half a li')
    real = os.open

    def refusing(name: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", name)
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    with timing_window(CPU):
        monkeypatch.undo()
        monkeypatch.setattr(timelock, "folder", lambda: tmp_path)
        assert not is_free_elsewhere()
    assert path.read_text() == '{"half a li'
