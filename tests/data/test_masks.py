"""Masks are read as they were saved, or refused in a sentence with a way out."""

import numpy as np
import pytest
import torch

from frontier.data.masks import open_mask

PREFIX = np.arange(40) < np.array([[40], [7], [0]])
MASKS = {
    "all true": np.ones((3, 40), bool),
    "a prefix, and a row with no valid token": PREFIX,
    "left padding": PREFIX[:, ::-1],
    "holes": np.random.default_rng(3).random((3, 40)) < 0.5,
}


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_of_any_kind_is_read_as_it_was_saved(tmp_path, case, kind, dtype):
    path = tmp_path / "mask.npy"
    np.save(path, np.ascontiguousarray(MASKS[kind].astype(dtype)))
    before = path.read_bytes()
    valid_BS = open_mask(path, case)
    assert valid_BS.dtype == torch.bool and np.array_equal(valid_BS.numpy(), MASKS[kind])
    assert not np.array_equal(valid_BS.numpy(), ~MASKS[kind])
    valid_BS.zero_()
    assert path.read_bytes() == before, "the tensor is the user's file"


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
@pytest.mark.parametrize("wrong", [2, 255])
def test_a_byte_that_is_neither_true_nor_false_is_refused_with_its_place(tmp_path, case, refusal, dtype, wrong):
    path = tmp_path / "mask.npy"
    np.save(path, np.ones((3, 40), dtype))
    data = bytearray(path.read_bytes())
    data[128 + 1 * 40 + 5] = wrong
    data[128 + 2 * 40] = 77
    path.write_bytes(data)
    assert refusal(open_mask, path, case) == (
        f"{path} holds {wrong} at row 1, position 5, a mask holds 0 and 1",
        "save (mask != 0)",
    )
    np.save(path, np.frombuffer(bytes(data[128:]), np.uint8).reshape(3, 40) != 0)
    assert open_mask(path, case).all()


@pytest.mark.parametrize(
    ("array", "message", "hint"),
    [
        (
            np.ones((3, 41), bool),
            "has shape [3 × 41], case small needs [3 × 40] (batch_size, seq_len)",
            "seq_len is 41",
        ),
        (
            np.ones((4, 40), bool),
            "has shape [4 × 40], case small needs [3 × 40] (batch_size, seq_len)",
            "batch_size is 4",
        ),
        (np.ones(120, bool), "has shape [120], case small needs [3 × 40] (batch_size, seq_len)", "save it with 2 dim"),
        (np.ones((3, 40), np.int64), "has dtype <i8 (int64), this reads |b1 or |u1", "save x.astype('|b1')"),
        (np.ones((3, 40), np.float32), "has dtype <f4 (float32), this reads |b1 or |u1", "save x.astype('|b1')"),
        (np.ones((3, 40), np.int8), "has dtype |i1 (int8), this reads |b1 or |u1", "save x.astype('|b1')"),
        (
            np.ones((3, 40), bool, order="F"),
            "is in Fortran order, this reads C order",
            "save numpy.ascontiguousarray(x)",
        ),
        (
            np.array([None]),
            "holds pickled Python objects (dtype |O), this reads |b1 or |u1",
            "nothing is ever unpickled",
        ),
    ],
)
def test_an_array_that_is_no_mask_of_the_case_is_refused(tmp_path, case, refusal, array, message, hint):
    path = tmp_path / "mask.npy"
    np.save(path, array)
    told, found_hint = refusal(open_mask, path, case)
    assert told == f"{path} {message}" and found_hint.startswith(hint)
    np.save(path, np.ones((3, 40), bool))
    open_mask(path, case)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (lambda data: data[:-1], "is cut short: 248 bytes expected, 247 found", "copy or write it again"),
        (
            lambda data: data[:100],
            "is cut short inside its header: at least 128 bytes expected, 100 found",
            "copy or write it again",
        ),
        (
            lambda data: data + b"\1",
            "goes on behind its data: 248 bytes expected, 249 found",
            "write it again: something else was appended to it",
        ),
        (lambda data: b"PK" + data, "is no .npy file: it begins with b'PK\\x93NUM'", "write it again with numpy.save"),
    ],
)
def test_a_mask_file_that_is_not_whole_is_refused(tmp_path, case, refusal, change, message, hint):
    path = tmp_path / "mask.npy"
    np.save(path, np.ones((3, 40), bool))
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    assert refusal(open_mask, path, case) == (f"{path} {message}", hint)
    path.write_bytes(whole)
    assert open_mask(path, case).all()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("mask.pt", "ends in `.pt`, a mask ends in .npy", "save it with numpy.save"),
        ("none.npy", "cannot be opened: No such file or directory", "give the path of a file that you may read"),
        ("dir.npy", "is a directory, not a file", "give the path of a regular file"),
    ],
)
def test_what_is_no_mask_file_is_refused(tmp_path, case, refusal, name, message, hint):
    (tmp_path / "dir.npy").mkdir()
    (tmp_path / "mask.pt").touch()
    assert refusal(open_mask, tmp_path / name, case) == (f"{tmp_path / name} {message}", hint)
