"""Rows come out of files as they were saved, however they are cut, and the files are only read."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from input_files import ALL, DATA_BYTES, read_all, save

from frontier.data import files
from frontier.data.files import open_source
from frontier.spans import Span


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("rows_per_read", [1, 2, 3])
@pytest.mark.parametrize("piece_bytes", [4, 100, 1 << 24])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("x.npy", torch.float32),
        ("x.npy", torch.float16),
        ("x.safetensors", torch.float32),
        ("x.safetensors", torch.float16),
        ("x.safetensors", torch.bfloat16),
    ],
)
def test_rows_come_back_as_they_were_saved_however_they_are_cut(
    tmp_path, case, x_BSD, monkeypatch, name, dtype, piece_bytes, rows_per_read, threads
):
    monkeypatch.setattr(files, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(files, "SERIAL_ELEMENTS", 16)
    path = save(tmp_path / name, x_BSD.to(dtype))
    found = read_all(path, case, rows_per_read=rows_per_read, threads=threads)
    assert torch.equal(found, x_BSD.to(dtype).float())
    assert torch.equal(found, x_BSD) == (dtype == torch.float32)
    assert not torch.equal(found, x_BSD.to(dtype).float().flip(0))


@pytest.mark.parametrize(("name", "dtype"), [("x.npy", torch.float16), ("x.safetensors", torch.bfloat16)])
def test_every_half_there_is_is_widened_exactly(tmp_path, make_case, name, dtype):
    case = make_case(batch_size=1, seq_len=64, d_model=1024)
    bits = np.arange(1 << 16, dtype=np.uint16)
    path = save(tmp_path / name, torch.from_numpy(bits).view(dtype).view(1, 64, 1024))
    found = read_all(path, case, rows_per_read=1).view(-1).numpy()
    by_bits = {
        torch.float16: bits.view(np.float16).astype(np.float32),
        torch.bfloat16: (bits.astype(np.uint32) << 16).view(np.float32),
    }
    np.testing.assert_array_equal(found, by_bits.pop(dtype))
    assert not np.array_equal(found, by_bits.popitem()[1], equal_nan=True)
    assert np.signbit(found[1 << 15]) and found[1 << 15] == 0 and found[1] > 0, "minus zero or subnormals are lost"


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_short_reads_are_gone_on_with(tmp_path, case, x_BSD, monkeypatch, name):
    path = save(tmp_path / name, x_BSD)
    real_preadv, calls = os.preadv, []

    def short_preadv(fd, buffers, offset):
        calls.append(offset)
        return real_preadv(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short_preadv)
    assert torch.equal(read_all(path, case), x_BSD)
    assert len(calls) > DATA_BYTES // 7

    monkeypatch.setattr(os, "preadv", real_preadv)
    source, into_BSD = open_source(path, case), torch.empty(3, 40, 6)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: short_preadv(fd, buffers, offset - offset % 2))
    source.read(ALL, into_BSD)
    assert not torch.equal(into_BSD, x_BSD), "a read that goes on at a wrong place gives the same"
    source.close()


def test_a_failing_disk_is_a_sentence(tmp_path, case, x_BSD, monkeypatch, failing, refusal):
    source = open_source(save(tmp_path / "x.npy", x_BSD), case)
    into_BSD = torch.empty(3, 40, 6)
    source.read(ALL, into_BSD)
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    assert refusal(source.read, Span(1, 2), into_BSD[:1]) == (
        f"{tmp_path}/x.npy cannot be read at byte 1,088: Input/output error",
        "copy the file to a sound disk and run again",
    )
    source.close()


def test_a_file_is_never_mapped_and_never_open_for_writing(tmp_path, case, x_BSD):
    path = save(tmp_path / "mine.npy", x_BSD)

    def is_mapped() -> bool:
        return "mine.npy" in Path("/proc/self/maps").read_text()

    def writable_fds() -> list[str]:
        mine = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.exists(fd) and os.readlink(fd) == str(path)]
        flags = [Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0] for fd in mine]
        return [flag for flag in flags if int(flag, 8) & os.O_ACCMODE]

    before = path.stat()
    source = open_source(path, case)
    source.read(ALL, torch.empty(3, 40, 6))
    assert not is_mapped() and not writable_fds()
    source.close()
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size, before.st_ino) == (after.st_mtime_ns, after.st_size, after.st_ino)
    mapped = np.load(path, mmap_mode="r")
    assert is_mapped() and mapped.shape == (3, 40, 6)
    with open(path, "r+b"):
        assert writable_fds()


def test_a_source_says_where_its_rows_are_from(tmp_path, case, x_BSD):
    save(tmp_path / "x.npy", x_BSD)
    save(tmp_path / "x.safetensors", x_BSD)
    (tmp_path / "link.npy").symlink_to("x.npy")
    for name, told in (
        ("link.npy", {"kind": "file", "path": f"{tmp_path}/x.npy"}),
        ("x.safetensors", {"kind": "file", "path": f"{tmp_path}/x.safetensors", "tensor": "x"}),
    ):
        source, found = open_source(tmp_path / name, case), (tmp_path / name).stat()
        assert source.describe() == told | {"size_bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
        source.close()
