"""A file under a `.partial` name, its space reserved, until it is whole.

Takes    a path, a header and a size; bytes at any place behind the header.
Gives    the file under its own name, or its part under the other.
Knows nothing of formats or rows.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from frontier.errors import DataError, ResumeError
from frontier.units import show_bytes

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PartialFile:
    """A file in the making, ours alone while it lasts.

    Order    the header is written before the first byte of data, not before: a part without one holds nothing that
             anybody could miss, and may be taken by the next run.
    Part     what to do with one that is there: "refuse" it, "replace" it, or "keep" what is in it and go on.

    Raises   DataError if the name is taken (unless `overwrite`), another run writes it, or the disk is too small;
             ResumeError if the part to be kept is not there, or was not made for this header and size.
    """

    def __init__(
        self,
        path: str | Path,
        header: bytes,
        data_bytes: int,
        *,
        overwrite: bool,
        part: Literal["refuse", "replace", "keep"] = "refuse",
    ) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._header = header
        self._num_bytes = len(header) + data_bytes
        self._has_header = False
        self._overwrite = overwrite
        self._closed = self._folder_is_synced = False
        _check_folder(self.path)
        # The last step of a run that was killed may have been to give the file its name.
        self.is_whole = part == "keep" and not os.path.lexists(self.partial) and os.path.isfile(self.path)
        if not self.is_whole:
            self._check_is_free()
        keeps = part == "keep"
        self._fd = _claim(
            self.path if self.is_whole else self.partial, self.path, "replace" if overwrite and not keeps else part
        )
        try:
            if keeps:
                self._check_is_ours()
            else:
                os.ftruncate(self._fd, 0)
                _reserve(self._fd, self.path, self._num_bytes)
        except BaseException:
            if keeps:
                self.close()
            else:
                self.discard()
            raise

    def write_header(self) -> None:
        """Mark the part as one that holds data. To be called before the first `write`."""
        if not self._has_header:
            self._write_all(memoryview(self._header), 0)
            self._has_header = True

    def write(self, data: memoryview, offset_bytes: int) -> None:
        """Put bytes at `offset_bytes` of the array.

        Raises   DataError if the disk is full or fails.
        """
        self._write_all(data, len(self._header) + offset_bytes)

    def read_into(self, into: memoryview, offset_bytes: int) -> None:
        """Fill `into` with what lies at `offset_bytes` behind the header.

        Raises   DataError if the disk fails, or the file was cut short by somebody else.
        """
        done_bytes = 0
        while done_bytes < len(into):
            try:
                got_bytes = os.preadv(self._fd, [into[done_bytes:]], len(self._header) + offset_bytes + done_bytes)
            except OSError as reason:
                raise self._failure(reason) from None
            if not got_bytes:
                raise DataError(f"{self.partial} was cut short while it was written", hint="start anew")
            done_bytes += got_bytes

    def sync(self) -> None:
        """Bring all bytes written so far to the disk.

        Raises   DataError if the disk fails.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as reason:
            raise self._failure(reason) from None
        if not self._folder_is_synced:  # the part's own name
            self._sync_folder()
            self._folder_is_synced = True

    def commit(self) -> None:
        """Bring the bytes to the disk, then give the file its name.

        Raises   DataError if the disk fails, or the name was taken meanwhile.
        """
        if self.is_whole:
            self.close()
            return
        try:
            os.fsync(self._fd)
            self._check_is_free()
            os.rename(self.partial, self.path)
        except OSError as reason:
            raise self._failure(reason) from None
        self.close()
        self._sync_folder()

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

    def _sync_folder(self) -> None:
        # Some network filesystems cannot sync a directory; the bytes of the file are safe by now.
        with suppress(OSError):
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _check_is_ours(self) -> None:
        """That the file to go on with is what a run that was killed leaves."""
        found_bytes = os.fstat(self._fd).st_size
        name = self.path if self.is_whole else self.partial
        if found_bytes != self._num_bytes or os.pread(self._fd, len(self._header), 0) != self._header:
            raise ResumeError(
                f"{name} is not what the run left: {self._num_bytes:,} bytes with its header expected, "
                f"{found_bytes:,} found",
                hint="put the right file there, or start anew with --overwrite",
            )
        self._has_header = True

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


def _check_folder(path: Path) -> None:
    try:
        os.stat(os.path.join(path.parent, ""))  # the slash: a file is refused too
    except OSError as reason:
        raise DataError(
            f"{path.name} cannot go to {path.parent}: {reason.strerror}", hint="make the directory first"
        ) from None


def _claim(partial: Path, path: Path, part: str) -> int:
    """Open and lock the part, so that two runs never write one output."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    left_over = False
    try:
        try:
            fd = os.open(partial, flags | (0 if part == "keep" else os.O_CREAT | os.O_EXCL), 0o666)
        except FileExistsError:
            left_over = True
            fd = os.open(partial, flags)
    except OSError as reason:
        if part == "keep":
            raise ResumeError(
                f"{partial} cannot be gone on with: {reason.strerror}",
                hint="put it back where the run left it, or start anew with --overwrite",
            ) from None
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
        if left_over and part == "refuse" and any(os.pread(fd, 16, 0)):
            raise DataError(
                f"{partial} is left from an interrupted run",
                hint="move it away if you need its rows, or allow it to be replaced with --overwrite",
            )
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
