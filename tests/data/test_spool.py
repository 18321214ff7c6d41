"""A spool gives back what was kept, from memory or from a file, and refuses before anything is computed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import frontier.data.spool as spool_module
from frontier.data.spool import FileSpool, MemorySpool, Spool
from frontier.errors import DataError, DoesNotFit

MakeSpool = Callable[[int], Spool]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSpool:
    monkeypatch.setattr(spool_module, "PIECE_BYTES", 1000)  # many pieces
    if request.param == "memory":
        return lambda num_bytes: MemorySpool(num_bytes, 3)
    return lambda num_bytes: FileSpool(tmp_path, num_bytes, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_kept_comes_back_bit_for_bit_and_what_lies_beside_it_stays(make: MakeSpool, dtype: torch.dtype) -> None:
    spool = make(100_000)
    whole, part = torch.randn(10_000).to(dtype), torch.randn(7, 123).to(dtype)
    spool.keep(0, whole)
    spool.keep(4_000, part)
    whole.view(-1)[4_000 // whole.itemsize :][: part.numel()] = part.view(-1)
    for at, length in ((0, 10_000), (500, 3), (9_999, 1)):
        into = torch.zeros(length, dtype=dtype)
        spool.fetch(at * whole.itemsize, into)
        assert torch.equal(into, whole[at : at + length])
    spool.close()


def test_nothing_at_all_can_be_kept(make: MakeSpool) -> None:
    spool = make(0)
    spool.keep(0, torch.empty(0, 4))
    spool.fetch(0, torch.empty(0, 4))
    spool.close()


def test_a_file_leaves_no_name_behind_even_while_it_is_open(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path, 10_000, 2)
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_a_file_with_a_name_lasts_only_if_it_is_to_be_kept_and_is_taken_as_it_is(tmp_path: Path) -> None:
    name, kept, into = tmp_path / "spool.bin", torch.randn(300), torch.zeros(300)
    spool = FileSpool(name, 10_000, 2)
    assert spool.is_new and name.stat().st_size == 10_000
    spool.close()
    assert not name.exists()
    spool = FileSpool(name, 10_000, 2)
    spool.keep(40, kept)
    spool.sync()
    spool.is_kept = True
    spool.close()
    spool = FileSpool(name, 10_000, 2)
    assert not spool.is_new
    spool.fetch(40, into)
    assert torch.equal(kept, into)
    spool.close()
    assert name.exists(), "what was there before stays"
    other = FileSpool(name, 10_001, 2)
    assert other.is_new and name.stat().st_size == 10_001
    other.close()


def test_a_name_that_is_no_file_of_ours_is_replaced_not_followed(tmp_path: Path) -> None:
    name, elsewhere = tmp_path / "spool.bin", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"7" * 10_000)
    for make in (lambda: name.symlink_to(elsewhere), lambda: os.mkfifo(name)):
        make()
        spool = FileSpool(name, 10_000, 2)
        assert spool.is_new
        spool.keep(0, torch.zeros(10))
        spool.close()
        assert not os.path.lexists(name) and elsewhere.read_bytes() == b"7" * 10_000


def test_a_disk_that_cannot_be_synced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int) -> None:
        raise OSError(5, os.strerror(5))

    spool = FileSpool(tmp_path / "spool.bin", 10_000, 2)
    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(DataError, match="cannot be kept: Input/output error"):
        spool.sync()
    spool.close()


def test_a_disk_too_small_is_refused_at_once_with_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot hold 9\.77 KiB of keys and values: No space left") as refused:
        FileSpool(tmp_path, 10_000, 2)
    assert "--run-dir" in str(refused.value.hint)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_later_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    spool = FileSpool(tmp_path, 10_000, 2)

    def fails(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(DataError, match="cannot be kept: Input/output error"):
        (spool.keep if call == "pwrite" else spool.fetch)(0, torch.zeros(10))
    spool.close()


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:5]], at))
    spool, kept, into = FileSpool(tmp_path, 10_000, 2), torch.randn(300), torch.zeros(300)
    spool.keep(40, kept)
    spool.fetch(40, into)
    assert torch.equal(kept, into)
    spool.close()


def test_memory_that_the_system_refuses_is_told_with_its_size() -> None:
    with pytest.raises(DoesNotFit, match="of host memory for keys and values") as refused:
        MemorySpool(1 << 60, 2)
    assert "--host-budget" in str(refused.value.hint)
