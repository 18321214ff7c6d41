"""A user's file, opened to be read only, never mapped, and watched for change.

Takes    a path.
Gives    its bytes, into memory that the caller owns.
Knows nothing of formats or of what the bytes mean.
"""

import os
import stat

from frontier.errors import DataError


class InputFile:
    """One regular file. Its name in messages is the path as the user gave it.

    Raises   DataError if it is missing, unreadable, or no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.path = os.path.realpath(path)
        try:
            # O_NONBLOCK: opening a named pipe would wait for its writer.
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as reason:
            raise DataError(
                f"{self.name} cannot be opened: {reason.strerror}", hint="give the path of a file that you may read"
            ) from None
        opened = os.fstat(self._fd)
        if not stat.S_ISREG(opened.st_mode):
            os.close(self._fd)
            kind = "a directory" if stat.S_ISDIR(opened.st_mode) else "a device or pipe"
            raise DataError(f"{self.name} is {kind}, not a file", hint="give the path of a regular file")
        self.size_bytes = opened.st_size
        self.state = {"size_bytes": opened.st_size, "mtime_ns": opened.st_mtime_ns}
        self._opened = opened
        self._closed = False

    def read_into(self, into: memoryview, offset_bytes: int) -> None:
        """Fill `into` from `offset_bytes` on, however short the single reads are.

        Raises   DataError if the device fails, or the file ends first.
        """
        done_bytes = 0
        while done_bytes < len(into):
            at_bytes = offset_bytes + done_bytes
            try:
                got_bytes = os.preadv(self._fd, [into[done_bytes:]], at_bytes)
            except OSError as reason:
                raise DataError(
                    f"{self.name} cannot be read at byte {at_bytes:,}: {reason.strerror}",
                    hint="copy the file to a sound disk and run again",
                ) from None
            if got_bytes == 0:
                raise DataError(
                    f"{self.name} was cut short while it was read: {self.size_bytes:,} bytes when opened, "
                    f"now nothing at byte {at_bytes:,}",
                    hint="run again on a file that nothing else writes to",
                )
            done_bytes += got_bytes

    def head(self, most_bytes: int) -> bytes:
        """The first `most_bytes` bytes, or the whole file if it is shorter."""
        head = bytearray(min(most_bytes, self.size_bytes))
        self.read_into(memoryview(head), 0)
        return bytes(head)

    def check_unchanged(self) -> None:
        """That the path still names the file that was opened, untouched.

        Raises   DataError if it was changed, replaced or removed.
        """
        then = self._opened
        try:
            now = os.stat(self.path)
        except OSError as reason:
            change = f"it cannot be found any more: {reason.strerror}"
        else:
            if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
                change = f"it is another file now (inode {then.st_ino} when opened, {now.st_ino} now)"
            elif now.st_size != then.st_size:
                change = f"{then.st_size:,} bytes when opened, {now.st_size:,} now"
            elif now.st_mtime_ns != then.st_mtime_ns:
                change = f"its time of last change moved by {(now.st_mtime_ns - then.st_mtime_ns) / 1e9:+.3f} s"
            else:
                return
        raise DataError(
            f"{self.name} changed while we ran: {change}", hint="run again on a file that nothing else writes to"
        )

    def close(self) -> None:
        """Give the file back. Closing twice is fine."""
        if not self._closed:
            os.close(self._fd)
            self._closed = True
