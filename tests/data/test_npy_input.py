"""An .npy file of any format is read, and one that is cut short, of another kind or hostile is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from input_files import AGAIN_NPY, BROKEN, CUT_SHORT, DATA_BYTES, NO_SHAPE, npy_bytes, npy_header, read_all, save

from frontier.data.files import open_source

HEADER_BYTES = 128
AS_F4 = "save x.astype('<f4')"


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_npy_format_is_read(tmp_path, case, x_BSD, version, refusal):
    path = tmp_path / "x.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, x_BSD.numpy(), version=version)
    assert torch.equal(read_all(path, case), x_BSD)
    data = bytearray(path.read_bytes())
    data[6] = 4
    path.write_bytes(data)
    assert refusal(open_source, path, case) == (f"{path} is of .npy format 4.0, this reads 1.0, 2.0 and 3.0", AGAIN_NPY)


@pytest.mark.parametrize(
    ("kept_bytes", "message"),
    [
        (HEADER_BYTES + DATA_BYTES - 1, "is cut short: 3,008 bytes expected, 3,007 found"),
        ((HEADER_BYTES + DATA_BYTES) // 2, "is cut short: 3,008 bytes expected, 1,504 found"),
        (HEADER_BYTES, "is cut short: 3,008 bytes expected, 128 found"),
        (HEADER_BYTES - 1, "is cut short inside its header: at least 128 bytes expected, 127 found"),
        (60, "is cut short inside its header: at least 128 bytes expected, 60 found"),
        (9, "is cut short inside its header: at least 10 bytes expected, 9 found"),
        (3, "is cut short inside its header: at least 12 bytes expected, 3 found"),
    ],
)
def test_an_npy_file_cut_short_anywhere_is_refused(tmp_path, case, x_BSD, refusal, kept_bytes, message):
    path = save(tmp_path / "x.npy", x_BSD)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept_bytes])
    assert refusal(open_source, path, case) == (f"{path} {message}", CUT_SHORT)
    path.write_bytes(whole)
    assert torch.equal(read_all(path, case), x_BSD)


@pytest.mark.parametrize(
    ("dtype", "message", "hint"),
    [
        ("<f8", "has dtype <f8 (float64), this reads <f4 or <f2", AS_F4),
        ("<i4", "has dtype <i4 (int32), this reads <f4 or <f2", AS_F4),
        (">f4", "has dtype >f4 (float32), this reads <f4 or <f2", AS_F4),
        ("?", "has dtype |b1 (bool), this reads <f4 or <f2", AS_F4),
        ("f4,f4", "has dtype |V8 (void64), this reads <f4 or <f2", AS_F4),
        (
            "O",
            "holds pickled Python objects (dtype |O), this reads <f4 or <f2",
            "nothing is ever unpickled; save x.astype(numpy.float32)",
        ),
    ],
)
def test_an_npy_dtype_that_is_not_read_is_refused(tmp_path, case, x_BSD, refusal, dtype, message, hint):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 40, 6), dtype=dtype))
    assert refusal(open_source, path, case) == (f"{path} {message}", hint)
    np.save(path, x_BSD.numpy())
    assert torch.equal(read_all(path, case), x_BSD)


def test_nothing_is_unpickled(tmp_path, case, refusal):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "bang"),)

    path = tmp_path / "x.npy"
    np.save(path, np.array([Bomb()], dtype=object))
    refusal(open_source, path, case)
    assert not (tmp_path / "bang").exists()
    np.load(path, allow_pickle=True)
    assert (tmp_path / "bang").exists()


def test_fortran_order_is_refused_with_a_way_out(tmp_path, case, x_BSD, refusal):
    path = tmp_path / "x.npy"
    fortran = np.asfortranarray(x_BSD.numpy())
    np.save(path, fortran)
    assert refusal(open_source, path, case) == (
        f"{path} is in Fortran order, this reads C order",
        "save numpy.ascontiguousarray(x)",
    )
    np.save(path, np.ascontiguousarray(fortran))
    assert torch.equal(read_all(path, case), x_BSD)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    ("header", "message"),
    [
        (npy_header("(3, 40, 99999999999)"), "has shape [3 × 40 × 99,999,999,999], case small needs [3 × 40 × 6]"),
        (npy_header("(-3, 40, 6)"), NO_SHAPE),
        (npy_header("(-3, -40, 6)"), NO_SHAPE),
        (npy_header("(3, 40, True)"), NO_SHAPE),
        (npy_header(f"(3, 40, {1 << 63})"), NO_SHAPE),
        (npy_header(f"({'9' * 4000},)"), NO_SHAPE),
        (npy_header(f"({'1,' * 65})"), NO_SHAPE),
        (npy_header(f"({'9' * 5000},)"), BROKEN),
        (npy_header("(3, 40, 6.0)"), BROKEN),
        (npy_header("__import__('os').mkdir('bang')"), BROKEN),
        (npy_header("(" * 300 + ")" * 300), BROKEN),
        (npy_header(descr="'<f99999999999'"), BROKEN),
        (npy_header(descr="5"), BROKEN),
        (npy_header(descr="('<f4', (9999999999999999999999,))"), BROKEN),
        (npy_header(fortran="0"), BROKEN),
        ("[]", BROKEN),
        ("", BROKEN),
        ("\0" * 100, BROKEN),
        ("{'descr': '<f4'}", BROKEN),
    ],
)
def test_a_hostile_npy_header_is_refused(tmp_path, case, refusal, monkeypatch, header, message, version):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.npy"
    path.write_bytes(npy_bytes(header, version))
    told, hint = refusal(open_source, path, case)
    assert told.startswith(f"{path} {message}") and "\n" not in told and len(told) < len(str(path)) + 250
    mend = "d_model is 99,999,999,999 in the file and 6 in the case: mend one of them"
    assert hint == (AGAIN_NPY if "broken" in told else mend)
    assert not Path("bang").exists()
    path.write_bytes(npy_bytes(npy_header(), version))
    assert not read_all(path, case).any()


@pytest.mark.parametrize(
    ("version", "claimed_bytes", "message", "hint"),
    [
        (2, 0xFFFFFFFF, "claims a header of 4,294,967,295 bytes, at most 10,000 are read", AGAIN_NPY),
        (1, 0xFFFF, "claims a header of 65,535 bytes, at most 10,000 are read", AGAIN_NPY),
        (1, 9000, "is cut short inside its header: at least 9,010 bytes expected, 2,954 found", CUT_SHORT),
    ],
)
def test_an_npy_header_of_a_claimed_length_is_not_believed(
    tmp_path, case, refusal, version, claimed_bytes, message, hint
):
    path = tmp_path / "x.npy"
    path.write_bytes(npy_bytes(npy_header(), version, claimed_bytes))
    assert refusal(open_source, path, case) == (f"{path} {message}", hint)
    path.write_bytes(npy_bytes(npy_header(), version))
    open_source(path, case).close()
