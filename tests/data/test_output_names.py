"""A name that is taken, cannot be, or belongs to another run is refused, and what bears it stays as it was."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from output_files import LEFT_OVER, OVERWRITE, names, saved_bytes, write_all

from frontier.data.sinks import FileSink


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("old.npy", "{path} exists already", OVERWRITE),
        ("dangling.npy", "{path} exists already", OVERWRITE),
        ("dir.npy", "{path} is a directory", "name a file in it"),
        ("y.bin", "{path} ends in `.bin`, an output ends in .npy or .safetensors", "name it y.npy"),
        ("y", "{path} ends in ``, an output ends in .npy or .safetensors", "name it y.npy"),
        ("none/y.npy", "y.npy cannot go to {parent}: No such file or directory", "make the directory first"),
        ("old.npy/y.npy", "y.npy cannot go to {parent}: Not a directory", "make the directory first"),
        ("left.npy", "{path}.partial is left from an interrupted run", LEFT_OVER),
        ("n" * 250 + ".npy", "{path}.partial cannot be created: File name too long", "name a file where you may write"),
    ],
)
def test_a_name_that_is_taken_or_cannot_be_is_refused(tmp_path, case, y_BSD, refusal, name, message, hint):
    (tmp_path / "dir.npy").mkdir()
    (tmp_path / "old.npy").write_text("old")
    (tmp_path / "dangling.npy").symlink_to("nowhere")
    (tmp_path / "left.npy.partial").write_text("left")
    before = names(tmp_path)
    path = tmp_path / name
    assert refusal(FileSink, path, case) == (message.format(path=path, parent=path.parent), hint)
    assert names(tmp_path) == before
    assert (tmp_path / "old.npy").read_text() == "old" and (tmp_path / "left.npy.partial").read_text() == "left"
    sink = FileSink(tmp_path / "free.npy", case)
    write_all(sink, y_BSD)
    sink.finish()
    assert names(tmp_path) == sorted([*before, "free.npy"])


def test_overwriting_replaces_an_output_only_when_the_new_one_is_whole(tmp_path, case, y_BSD):
    path = tmp_path / "y.npy"
    path.write_text("old")
    sink = FileSink(path, case, overwrite=True)
    write_all(sink, y_BSD)
    assert path.read_text() == "old"
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert names(tmp_path) == ["y.npy"]


def test_overwriting_replaces_what_an_interrupted_run_left(tmp_path, case, y_BSD):
    (tmp_path / "y.npy.partial").write_bytes(b"left" * 5000)
    sink = FileSink(tmp_path / "y.npy", case, overwrite=True)
    write_all(sink, y_BSD)
    sink.finish()
    assert (tmp_path / "y.npy").read_bytes() == saved_bytes(y_BSD)


def test_a_link_in_the_place_of_the_part_is_not_followed(tmp_path, case, y_BSD, refusal):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "y.npy.partial").symlink_to("precious")
    assert refusal(FileSink, tmp_path / "y.npy", case, overwrite=True) == (
        f"{tmp_path}/y.npy.partial cannot be created: Too many levels of symbolic links",
        "name a file where you may write",
    )
    assert (tmp_path / "precious").read_text() == "precious"
    (tmp_path / "y.npy.partial").unlink()
    FileSink(tmp_path / "y.npy", case, overwrite=True).abandon()


def test_a_name_taken_while_we_ran_is_not_overwritten(tmp_path, case, y_BSD, refusal):
    path = tmp_path / "y.npy"
    sink = FileSink(path, case)
    write_all(sink, y_BSD)
    path.write_text("theirs")
    assert refusal(sink.finish) == (f"{path} exists already", OVERWRITE)
    assert path.read_text() == "theirs"
    path.unlink()
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)


def test_a_directory_that_may_only_be_read_is_refused(small_disk, case, refusal):
    FileSink(small_disk / "y.npy", case).abandon()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert refusal(FileSink, small_disk / "y.npy", case) == (
        f"{small_disk}/y.npy.partial cannot be created: Read-only file system",
        "name a file where you may write",
    )
    assert names(small_disk) == []


def test_a_directory_that_may_not_be_entered_is_a_sentence(tmp_path, case, monkeypatch, refusal):
    real_stat = os.stat

    def closed_stat(path, **options):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real_stat(path, **options)

    with monkeypatch.context() as closed:
        closed.setattr(os, "stat", closed_stat)
        assert refusal(FileSink, tmp_path / "y.npy", case) == (
            f"y.npy cannot go to {tmp_path}: Permission denied",
            "make the directory first",
        )
    FileSink(tmp_path / "y.npy", case).abandon()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_sink_on_one_output_is_refused(tmp_path, case, y_BSD, refusal, overwrite):
    path = tmp_path / "y.npy"
    first = FileSink(path, case)
    write_all(first, y_BSD)
    assert refusal(FileSink, path, case, overwrite) == (
        f"another run is writing {path}",
        "wait for it, or name another file",
    )
    first.finish()
    assert path.read_bytes() == saved_bytes(y_BSD), "the second sink harmed the first one's file"
    FileSink(path, case, overwrite=True).abandon()


def test_an_abandoned_sink_does_not_remove_its_successors_part(tmp_path, case):
    first = FileSink(tmp_path / "y.npy", case)
    first.abandon()
    second = FileSink(tmp_path / "y.npy", case)
    first.abandon()
    assert names(tmp_path) == ["y.npy.partial"]
    second.abandon()
    assert names(tmp_path) == []


KILLED = """
import sys, torch
from pathlib import Path
from frontier.case import Case
from frontier.data.sinks import FileSink
from frontier.spans import Span
case = Case(name="small", batch_size=3, seq_len=40, d_model=6, heads=2, ffn_dim=8, layers=1)
sink = FileSink(Path(sys.argv[1]), case)
row = 0
while True:
    sink.write(Span(row % 2, row % 2 + 1), torch.full((1, 40, 6), float(row)))
    row += 1
    if row == 2:
        print("writing", flush=True)
"""


def test_a_run_killed_while_it_writes_leaves_only_its_part(tmp_path, case, y_BSD, refusal):
    path = tmp_path / "y.npy"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "writing\n"
            assert refusal(FileSink, path, case, overwrite=True)[0] == f"another run is writing {path}"
        finally:
            run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    assert names(tmp_path) == ["y.npy.partial"]
    assert refusal(FileSink, path, case) == (f"{path}.partial is left from an interrupted run", LEFT_OVER)
    sink = FileSink(path, case, overwrite=True)
    write_all(sink, y_BSD)
    sink.finish()
    assert path.read_bytes() == saved_bytes(y_BSD)
    assert names(tmp_path) == ["y.npy"]
