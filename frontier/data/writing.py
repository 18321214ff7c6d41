"""An .npy file under a `.partial` name, its space reserved, until it is whole.

Takes    a path and a shape; float32 bytes at any place.
Gives    the file under its own name, or its part under the other.
Knows nothing of rows.
"""

import errno
import fcntl
import io
import math
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from frontier.errors import DataError
from frontier.units import show_bytes

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PartialNpy:
    """A float32 .npy file in the making, ours alone while it lasts.

    Raises   DataError if the name is taken (unless `overwrite`), another run writes it, or the disk is too small.
    """

    def __init__(self, path: str | Path, shape: tuple[int, ...], *, overwrite: bool) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._overwrite = overwrite
        self._closed = False
        _check_name(self.path)
        self._check_is_free()
        self._fd = _claim(self.partial, self.path, overwrite)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        self._data_begin_bytes = header.tell()
        try:
            _reserve(self._fd, self.path, self._data_begin_bytes + 4 * math.prod(shape))
            self._write_all(memoryview(header.getvalue()), 0)
        except BaseException:
            self.discard()
            raise

    def write(self, data: memoryview, offset_bytes: int) -> None:
        """Put bytes at `offset_bytes` of the array.

        Raises   DataError if the disk is full or fails.
        """
        self._write_all(data, self._data_begin_bytes + offset_bytes)

    def commit(self) -> None:
        """Bring the bytes to the disk, then give the file its name.

        Raises   DataError if the disk fails, or the name was taken meanwhile.
        """
        try:
            os.fsync(self._fd)
            self._check_is_free()
            os.rename(self.partial, self.path)
        except OSError as reason:
            raise self._failure(reason) from None
        self.close()
        # Some network filesystems cannot sync a directory; the bytes of the file are safe by now.
        with suppress(OSError):
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def discard(self) -> None:
        """Remove the part, if it is still ours."""
        if not self._closed:
            self.partial.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Let go of the file, whatever its name is now. Closing twice is fine."""
        if not self._closed:
            os.close(self._fd)
            self._closed = True

    def _check_is_free(self) -> None:
        if os.path.isdir(self.path):
            raise DataError(f"{self.path} is a directory", hint="name a file in it")
        if not self._overwrite and os.path.lexists(self.path):
            raise DataError(f"{self.path} exists already", hint="name another file, or allow it with --overwrite")

    def _write_all(self, data: memoryview, offset_bytes: int) -> None:
        done_bytes = 0
        while done_bytes < len(data):
            try:
                done_bytes += os.pwrite(self._fd, data[done_bytes:], offset_bytes + done_bytes)
            except OSError as reason:
                raise self._failure(reason) from None

    def _failure(self, reason: OSError) -> DataError:
        if reason.errno in _FULL:
            return DataError(
                f"the disk filled up while {self.path} was written: {show_bytes(_free_bytes(self.path.parent))} free "
                f"({reason.strerror})",
                hint="free space, or name a file on a larger disk",
            )
        return DataError(f"{self.path} cannot be written: {reason.strerror}", hint="name a file on a sound disk")


def _check_name(path: Path) -> None:
    if path.suffix != ".npy":
        raise DataError(f"{path} ends in `{path.suffix}`, an output ends in .npy", hint=f"name it {path.stem}.npy")
    try:
        os.stat(os.path.join(path.parent, ""))  # the slash: a file is refused too
    except OSError as reason:
        raise DataError(
            f"{path.name} cannot go to {path.parent}: {reason.strerror}", hint="make the directory first"
        ) from None


def _claim(partial: Path, path: Path, overwrite: bool) -> int:
    """Open and lock the part, so that two runs never write one output."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    left_over = False
    try:
        try:
            fd = os.open(partial, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            left_over = True
            fd = os.open(partial, flags)
    except OSError as reason:
        raise DataError(
            f"{partial} cannot be created: {reason.strerror}", hint="name a file where you may write"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between our opening and our lock, its owner may have renamed or removed it.
            ours = os.path.samestat(os.fstat(fd), os.stat(partial))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        except OSError as reason:
            raise DataError(
                f"{partial} cannot be locked: {reason.strerror}", hint="name a file on a local disk"
            ) from None
        if not ours:
            raise DataError(f"another run is writing {path}", hint="wait for it, or name another file")
        if left_over and not overwrite:
            raise DataError(
                f"{partial} is left from an interrupted run",
                hint="move it away if you need its rows, or allow it to be replaced with --overwrite",
            )
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, path: Path, needed_bytes: int) -> None:
    """Take the space now: a disk that fills up later costs a run, and SIGBUS where a file is mapped."""
    free_bytes = _free_bytes(path.parent)
    try:
        try:
            os.posix_fallocate(fd, 0, needed_bytes)
        except OSError as reason:
            if reason.errno not in _NO_FALLOCATE:
                raise
            if free_bytes < needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            os.ftruncate(fd, needed_bytes)
    except OSError as reason:
        raise DataError(
            f"{path} needs {show_bytes(needed_bytes)} ({needed_bytes:,} bytes), "
            f"{show_bytes(free_bytes)} ({free_bytes:,} bytes) are free: {reason.strerror}",
            hint="free space, or name a file on a larger disk",
        ) from None


def _free_bytes(directory: Path) -> int:
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize
