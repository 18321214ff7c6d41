"""One lock a card: while somebody times on it, nobody else computes on it.

Takes    a machine.
Gives    two context managers: an exclusive one to time under, a shared one to compute under.
Knows nothing of what is timed or computed.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from frontier.errors import DataError, InUse
from frontier.machine import Machine

# What this thread holds, by lock file: a tuner gates inside its own window.
_held = threading.local()


def timing_window(machine: Machine) -> AbstractContextManager[None]:
    """Hold the machine's device alone, for as long as times are taken.

    Raises   InUse at once, naming the holder, if another process or thread times or computes there; DataError if
             the temp folder takes no lock.
    """
    return _lock(lock_path(machine), alone=True)


def using_card(machine: Machine) -> AbstractContextManager[None]:
    """Compute on the machine's device beside others who compute, but never beside one who times.

    Raises   InUse at once, naming the holder, if another process or thread times there.
    """
    return _lock(lock_path(machine), alone=False)


def lock_path(machine: Machine) -> Path:
    """The lock file of a device, in the temp folder: by the card's UUID, since an index may change."""
    name = "cpu"
    if machine.has_card:
        import torch

        name = str(torch.cuda.get_device_properties(machine.device).uuid)
    return folder() / f"frontier-{re.sub(r'[^A-Za-z0-9-]', '', name)}.lock"


def folder() -> Path:
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _lock(path: Path, *, alone: bool) -> Iterator[None]:
    held: dict[Path, bool] = _held.__dict__.setdefault("locks", {})
    if path in held:
        if alone and not held[path]:
            raise InUse(f"{path.name}: a timing window was asked for by work that others may share", hint=_HINT)
        yield
        return
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(_in_use(path, alone), hint=_HINT) from None
        _sign(descriptor, alone)
        held[path] = alone
        yield
    finally:
        held.pop(path, None)
        with contextlib.suppress(OSError):  # a child that was forked meanwhile holds the same lock: let go for it too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_HINT = "wait until it is done, or end it; the lock goes with the process that holds it"


def _open(path: Path) -> int:
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:  # another user's file: it can be locked, not signed
            return os.open(path, os.O_RDONLY)
    except OSError as reason:
        raise DataError(
            f"the lock {path} cannot be opened: {reason.strerror}",
            hint="TMPDIR names its folder; all who use the device must name the same",
        ) from None
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, 0o666)
    return descriptor


def _sign(descriptor: int, alone: bool) -> None:
    """Leave this process's name for those whom the lock refuses."""
    me = psutil.Process()
    line = {"pid": me.pid, "began_s": me.create_time(), "command": shlex.join(sys.argv), "times": alone}
    with contextlib.suppress(OSError):
        if alone:
            os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_END)
        os.write(descriptor, json.dumps(line).encode() + b"\n")


def _in_use(path: Path, alone: bool) -> str:
    holders = [line for line in _signatures(path) if _lives(line)]
    if not alone:
        holders = [line for line in holders if line["times"]]
    names = " and ".join(
        f"process {line['pid']} (`{line['command']}`) {'times' if line['times'] else 'computes'}" for line in holders
    )
    wish = "nothing may be timed" if alone else "nothing may be computed"
    return f"{names or 'another process works'} on this device ({path.name}): {wish} meanwhile"


def _signatures(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # half a line: its writer was killed
            found.append(json.loads(line))
    return found


def _lives(line: dict[str, Any]) -> bool:
    try:
        return bool(psutil.Process(line["pid"]).create_time() == line["began_s"])
    except psutil.Error:
        return False
