"""Keeps on disk which rows, and which parts of a row, are safely written, so that a killed run can go on.

Takes    what is written, callables that hash it, and one that brings it to the disk.
Gives    an append-only file of lines with a checksum each; what such a file claims.
Knows nothing of files of rows, of layers or of what the numbers mean.

A line is a JSON object, a blank, the object's CRC-32 in eight hexadecimal digits. The first names the run; each
other claims whole rows: `{"rows": [3, 5], "sha256": ["...", "..."]}`, of a row the last counts; or what a
step of the row under way wrote: `{"row": 5, "step": 9, "sha256": "..."}`.
"""

import json
import os
import queue
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from frontier.errors import DataError, ResumeError
from frontier.spans import Span, joined
from frontier.units import MIB, show_bytes

# Seconds between two claims: at least, at most, and as a multiple of what the last one took. A sync holds up those who
# write meanwhile (a disk here: 13 to 170 ms, one a second cost 12 % of a pass), so 100 times as long stays within 1 %.
LEAST_S, MOST_S, TIMES_A_SYNC = 1.0, 60.0, 100.0
CAP_BYTES = 256 * MIB  # two million rows

_HASH = re.compile(r"[0-9a-f]{64}")
_ANEW = "start anew with --overwrite"


class Part(NamedTuple):
    """A step of a row that is under way, counted from its first, and the hash of what it wrote."""

    row: int
    step: int
    sha256: str


class Claims(NamedTuple):
    """What a journal says: the run it is of, each finished row's hash, the numbers of lines that are broken, and the
    parts of the row that was under way, in order."""

    run: str
    row_sha256: dict[int, str]
    broken_lines: list[int]
    parts: list[Part]


class Journal:
    """Is told what was written; a thread hashes it at once, and every now and then syncs it and says so in the file.

    `run` is a fingerprint of what makes a run another one. `hash_of` gives a row's hash, `sync` brings all rows
    written so far to the disk. `claimed` is what an earlier start of the run has finished, `parts` what it had of the
    row that is gone on with.

    Raises   DataError if the file cannot be written; later from the call that follows, or from `close`.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        hash_of: Callable[[int], str],
        sync: Callable[[], None],
        claimed: Mapping[int, str],
        parts: Sequence[Part] = (),
    ) -> None:
        self._path, self._hash_of, self._sync = path, hash_of, sync
        self._news: queue.SimpleQueue[Span | Callable[[], Part] | threading.Event | None] = queue.SimpleQueue()
        self._waiting: list[threading.Event] = []
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        try:
            self._fd = self._begin([_line({"journal": 1, "run": run}), *_claim_lines(claimed, parts)])
        except OSError as reason:
            raise self._told(reason) from None
        self._thread = threading.Thread(target=self._listen, name="frontier-journal", daemon=True)
        self._thread.start()

    def add(self, news: Span | Callable[[], Part]) -> None:
        """Claim rows that are written, or a part that its call hashes, once they are on the disk; returns at once."""
        if self._failure is not None:
            raise self._failure
        self._news.put(news)

    def settle(self) -> None:
        """Return when all that was added is claimed: what comes next may write over what parts need."""
        settled = threading.Event()
        self._news.put(settled)
        while not settled.wait(0.5) and self._thread.is_alive():
            continue  # a thread that failed sets nothing
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Claim all that was written, then end the thread. Closing twice is fine."""
        if not self._closing.is_set():
            self._closing.set()
            self._news.put(None)
            self._thread.join()
            os.close(self._fd)
        if self._failure is not None:
            raise self._failure

    def _begin(self, lines: list[bytes]) -> int:
        """A file with the first line and the earlier claims, its name given when all of it is on the disk."""
        partial = self._path.with_name(f"{self._path.name}.partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _write_all(fd, b"".join(lines))
            os.fsync(fd)
            os.replace(partial, self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # some network filesystems cannot sync a directory
                os.fsync(directory)
            os.close(directory)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _listen(self) -> None:
        hashed, parts = dict[int, str](), list[Part]()  # and not yet claimed
        due_s, ends = 0.0, False
        try:
            while not ends:
                ends = self._hash_news(hashed, parts, due_s)
                began_s = time.monotonic()
                if (hashed or parts) and (ends or self._waiting or began_s >= due_s):
                    self._sync()
                    _write_all(self._fd, b"".join(_claim_lines(hashed, parts)))
                    os.fsync(self._fd)
                    hashed.clear()
                    parts.clear()
                    now_s = time.monotonic()
                    due_s = now_s + min(MOST_S, max(LEAST_S, TIMES_A_SYNC * (now_s - began_s)))
                while self._waiting:
                    self._waiting.pop().set()
        except BaseException as failure:
            self._failure = failure if not isinstance(failure, OSError) else self._told(failure)

    def _hash_news(self, hashed: dict[int, str], parts: list[Part], due_s: float) -> bool:
        """Hash what has come, if nothing then what comes until a claim is due; whether the journal is to end."""
        with suppress(queue.Empty):
            news = self._news.get(timeout=max(0.0, due_s - time.monotonic()) if hashed or parts else None)
            while news is not None:
                if isinstance(news, threading.Event):
                    self._waiting.append(news)
                    return False
                if isinstance(news, Span):
                    hashed.update((row, self._hash_of(row)) for row in range(*news))
                else:
                    parts.append(news())
                news = self._news.get_nowait()
            return True
        return False

    def _told(self, reason: OSError) -> DataError:
        return DataError(
            f"{self._path} cannot be written: {reason.strerror}", hint="name a --run-dir on a sound disk with room"
        )


def read_journal(path: Path, num_rows: int) -> Claims | None:
    """What the journal at `path` claims of rows `[0, num_rows)`, or None if there is none.

    A line that is cut short or damaged claims nothing; its number is told.

    Raises   ResumeError if the file is none of ours, too large, or names no run.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as reason:
        raise ResumeError(f"{path} cannot be read: {reason.strerror}", hint=_ANEW) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > CAP_BYTES:
            raise ResumeError(
                f"{path} is no journal: {show_bytes(found.st_size)}, a regular file of at most "
                f"{show_bytes(CAP_BYTES)} is read",
                hint=_ANEW,
            )
        *lines, tail = os.read(fd, found.st_size).split(b"\n")
    finally:
        os.close(fd)
    first, *others = [_object(line) for line in lines] or [None]
    others += [None] * bool(tail)  # without its end: the run was killed while it was written
    if first is None or first.get("journal") != 1 or not isinstance(first.get("run"), str):
        raise ResumeError(f"{path} is damaged in its first line: it names no run", hint=_ANEW)
    claims = Claims(first["run"], {}, [], [])
    for number, said in enumerate(others, start=2):
        if (part := _part_of(said, num_rows)) is not None:
            if claims.parts and claims.parts[0].row != part.row:
                claims.parts.clear()
            claims.parts.append(part)
        elif (claim := _claim_of(said, num_rows)) is not None:
            claims.row_sha256.update(claim)
            if claims.parts and claims.parts[0].row in claim:
                claims.parts.clear()
        else:
            claims.broken_lines.append(number)
    return claims


def _part_of(said: dict[str, Any] | None, num_rows: int) -> Part | None:
    """What a line claims of a row under way, else None."""
    row, step, found = (said.get(name) for name in Part._fields) if said else (None, None, None)
    if type(row) is not int or type(step) is not int or not isinstance(found, str):
        return None
    return Part(row, step, found) if 0 <= row < num_rows and step >= 0 and _HASH.fullmatch(found) else None


def _claim_of(said: dict[str, Any] | None, num_rows: int) -> dict[int, str] | None:
    """Row and hash of a line that claims what a run can have written, else None."""
    rows, hashes = (said or {}).get("rows"), (said or {}).get("sha256")
    if not isinstance(rows, list) or not isinstance(hashes, list) or [type(row) for row in rows] != [int, int]:
        return None
    start, stop = rows
    if not 0 <= start < stop <= num_rows or len(hashes) != stop - start:
        return None
    if not all(isinstance(text, str) and _HASH.fullmatch(text) for text in hashes):
        return None
    return dict(zip(range(start, stop), hashes, strict=True))


def _claim_lines(row_sha256: Mapping[int, str], parts: Sequence[Part] = ()) -> list[bytes]:
    """A row is claimed behind its parts."""
    said: list[dict[str, Any]] = [part._asdict() for part in parts]
    said += [{"rows": list(rows), "sha256": [row_sha256[row] for row in range(*rows)]} for rows in joined(row_sha256)]
    return [_line(claim) for claim in said]


def _line(said: dict[str, Any]) -> bytes:
    text = json.dumps(said).encode("ascii")
    return b"%s %08x\n" % (text, zlib.crc32(text))


def _object(line: bytes) -> dict[str, Any] | None:
    """The object on a line that is whole, else None."""
    text, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _write_all(fd: int, data: bytes) -> None:
    done_bytes = 0
    while done_bytes < len(data):
        done_bytes += os.write(fd, data[done_bytes:])
