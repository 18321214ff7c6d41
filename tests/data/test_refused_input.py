"""What is no input of the case, in either format, is refused in a sentence with a way out."""

import os

import pytest
import torch
from input_files import AGAIN_NPY, CUT_SHORT, DATA_BYTES, THREE_DIMENSIONS, read_all, save

from frontier.data.files import open_source
from frontier.errors import DataError


@pytest.mark.parametrize(
    ("name", "tensor", "message", "hint"),
    [
        ("none.npy", None, "cannot be opened: No such file or directory", "give the path of a file that you may read"),
        ("dir.npy", None, "is a directory, not a file", "give the path of a regular file"),
        ("pipe.npy", None, "is a device or pipe, not a file", "give the path of a regular file"),
        (
            "x.pt",
            None,
            "ends in `.pt`, an input ends in .npy or .safetensors",
            "save it with numpy.save or safetensors.torch.save_file",
        ),
        ("good.npy", "y", "holds one array without a name, tensor 'y' was asked of it", "name none"),
        ("text.npy", None, "is no .npy file: it begins with b'hello '", AGAIN_NPY),
        ("empty.npy", None, "is cut short inside its header: at least 12 bytes expected, 0 found", None),
        ("empty.safetensors", None, "is cut short inside its header: at least 8 bytes expected, 0 found", None),
    ],
)
def test_what_is_no_input_is_refused(tmp_path, case, x_BSD, refusal, name, tensor, message, hint):
    (tmp_path / "dir.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "text.npy").write_text("hello world")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "empty.safetensors").touch()
    save(tmp_path / "good.npy", x_BSD)
    path = tmp_path / name
    assert refusal(open_source, path, case, tensor) == (f"{path} {message}", hint or CUT_SHORT)
    open_source(tmp_path / "good.npy", case).close()


def test_a_refused_file_is_closed_again(tmp_path, case, make_case, x_BSD, refusal):
    path = save(tmp_path / "x.npy", x_BSD)
    before = set(os.listdir("/proc/self/fd"))
    refusal(open_source, path, make_case())
    assert set(os.listdir("/proc/self/fd")) == before
    source = open_source(path, case)
    assert set(os.listdir("/proc/self/fd")) > before
    source.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_bytes_behind_the_data_are_refused(tmp_path, case, x_BSD, refusal, name):
    path = save(tmp_path / name, x_BSD)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"\0")
    assert refusal(open_source, path, case) == (
        f"{path} goes on behind its data: {size:,} bytes expected, {size + 1:,} found",
        "write it again: something else was appended to it",
    )
    os.truncate(path, size)
    open_source(path, case).close()


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
@pytest.mark.parametrize(
    ("shape", "shown", "hint"),
    [
        ((120, 6), "[120 × 6]", THREE_DIMENSIONS),
        ((3, 40, 3, 2), "[3 × 40 × 3 × 2]", THREE_DIMENSIONS),
        ((6, 20, 6), "[6 × 20 × 6]", "batch_size is 6 in the file and 3 in the case: mend one of them"),
        ((3, 60, 4), "[3 × 60 × 4]", "seq_len is 60 in the file and 40 in the case: mend one of them"),
        ((3, 40, 7), "[3 × 40 × 7]", "d_model is 7 in the file and 6 in the case: mend one of them"),
        ((0, 40, 6), "[0 × 40 × 6]", "batch_size is 0 in the file and 3 in the case: mend one of them"),
        ((1,) * 9, "[1 × 1 × 1 × 1 × 1 × 1 × … (9 sizes)]", THREE_DIMENSIONS),
    ],
)
def test_a_shape_that_is_not_the_cases_is_refused(tmp_path, case, refusal, name, shape, shown, hint):
    path = save(tmp_path / name, torch.zeros(shape))
    assert refusal(open_source, path, case) == (
        f"{path} has shape {shown}, case small needs [3 × 40 × 6] (batch_size, seq_len, d_model)",
        hint,
    )
    save(path, torch.zeros(3, 40, 6))
    open_source(path, case).close()


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_no_single_wrong_byte_in_a_header_gives_other_numbers(tmp_path, case, x_BSD, refusal, name):
    path = save(tmp_path / name, x_BSD)
    good = path.read_bytes()
    refused = 0
    for at in range(len(good) - DATA_BYTES):
        for byte in b"\x00'1L(\xff":
            path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
            try:
                found = read_all(path, case)
            except DataError as reason:
                assert reason.hint and str(reason).startswith(str(path))
                refused += 1
            else:
                assert torch.equal(found, x_BSD)
    assert refused > 200
