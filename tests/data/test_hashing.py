"""Hashes of rows and files follow the contract."""

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from frontier.data.hashing import file_hash, row_hash
from frontier.errors import DataError


def plain_hash(row_SD: torch.Tensor) -> str:
    """Section 6 of the contract, byte by byte."""
    digests = b""
    for begin in range(0, len(row_SD), 4096):
        values = row_SD[begin : begin + 4096].reshape(-1).tolist()
        digests += hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).digest()
    return hashlib.sha256(digests).hexdigest()


@pytest.mark.parametrize("positions", [1, 4095, 4096, 4097, 9000])
def test_a_row_hashes_as_the_contract_says_on_any_number_of_threads(positions):
    row_SD = torch.randn(positions, 3)
    for threads in (1, 4):
        with ThreadPoolExecutor(threads) as pool:
            assert row_hash(row_SD, pool) == plain_hash(row_SD)


def test_the_hash_of_a_known_row_is_golden(pool):
    row_SD = torch.arange(2 * 5000, dtype=torch.float32).view(5000, 2)
    assert row_hash(row_SD, pool) == "24a773deb83726d5dd009f970906972fa5eee2452c7b8f6478e110ca80d1bd45"


def test_every_value_and_its_place_count(pool):
    row_SD = torch.arange(2 * 8192, dtype=torch.float32).view(8192, 2)
    known = row_hash(row_SD, pool)
    last_bit_SD = row_SD.clone()
    last_bit_SD.view(torch.int32)[8191, 1] ^= 1
    swapped_SD = torch.cat([row_SD[4096:], row_SD[:4096]])
    minus_zero_SD = row_SD.clone()
    minus_zero_SD[0, 0] = -0.0
    for other_SD in (last_bit_SD, swapped_SD, minus_zero_SD, row_SD[:8191]):
        assert row_hash(other_SD, pool) != known
    assert hashlib.sha256(row_SD.numpy().tobytes()).hexdigest() != known
    assert row_hash(row_SD.clone(), pool) == known


def test_a_file_hashes_to_the_sha_256_of_its_bytes(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_hash(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path.write_bytes(b"abd")
    assert file_hash(str(path)) != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_that_cannot_be_hashed_is_named(tmp_path):
    for path, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError) as caught:
            file_hash(path)
        assert str(caught.value) == f"{path} cannot be hashed: {reason}"
        assert caught.value.hint == "give the path of a file that you may read"
