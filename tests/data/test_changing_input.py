"""A file that changes while it is read, or after, is refused at the latest when it is closed."""

import os
from pathlib import Path

import pytest
import torch
from input_files import ALL, save

from frontier.data.files import open_source

NOTHING_ELSE = "run again on a file that nothing else writes to"


def replace(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def rewrite(path: Path) -> None:
    then_ns = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(then_ns, then_ns + 2_500_000_000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 4000), "changed while we ran: 3,008 bytes when opened, 4,000 now"),
        (replace, "changed while we ran: it is another file now (inode "),
        (rewrite, "changed while we ran: its time of last change moved by +2.500 s"),
        (os.unlink, "changed while we ran: it cannot be found any more: No such file or directory"),
        (
            lambda path: os.truncate(path, 1000),
            "was cut short while it was read: 3,008 bytes when opened, now nothing at byte 1,000",
        ),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, case, x_BSD, refusal, change, message):
    path = save(tmp_path / "x.npy", x_BSD)
    into_BSD = torch.empty(3, 40, 6)
    source = open_source(path, case)
    source.read(ALL, into_BSD)
    change(path)
    told, hint = refusal(source.read, ALL, into_BSD)
    assert told.startswith(f"{path} {message}") and hint == NOTHING_ELSE
    told, hint = refusal(source.close)
    assert told.startswith(f"{path} changed while we ran: ") and hint == NOTHING_ELSE


def test_a_file_that_changes_after_the_last_read_is_refused_at_closing(tmp_path, case, x_BSD, refusal):
    path = save(tmp_path / "x.npy", x_BSD)
    quiet, disturbed = open_source(path, case), open_source(path, case)
    quiet.read(ALL, torch.empty(3, 40, 6))
    path.read_bytes()
    quiet.close()
    disturbed.read(ALL, torch.empty(3, 40, 6))
    rewrite(path)
    assert refusal(disturbed.close)[1] == NOTHING_ELSE
