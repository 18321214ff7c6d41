"""Rows come out of files as they were saved, or the file is refused in a sentence with a way out."""

import errno
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from frontier.data import files
from frontier.data.files import open_source
from frontier.spans import Span, cut

HEADER_BYTES, DATA_BYTES = 128, 3 * 40 * 6 * 4
ALL = Span(0, 3)
AGAIN_NPY = "write it again with numpy.save"
AGAIN_SAFETENSORS = "write it again with safetensors.torch.save_file"
NOTHING_ELSE = "run again on a file that nothing else writes to"


@pytest.fixture(name="x_BSD")
def some_rows() -> torch.Tensor:
    return torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(7))


def read_all(path, case, tensor=None, *, rows_per_read=3, threads=2) -> torch.Tensor:
    source = open_source(path, case, tensor, threads)
    whole = torch.full((case.batch_size, case.seq_len, case.d_model), float("nan"))
    for rows in cut(case.batch_size, rows_per_read):
        source.read(rows, whole[rows.as_slice()])
    source.close()
    return whole


def save(path: Path, x_BSD: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, x_BSD.numpy())
    else:
        save_file({"x": x_BSD}, path)
    return path


def npy_bytes(header: str, version: int = 1, claimed_bytes: int | None = None) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header) if claimed_bytes is None else claimed_bytes)
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode("latin1") + bytes(DATA_BYTES)


def npy_header(shape: str = "(3, 40, 6)", descr: str = "'<f4'", fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def safetensors_bytes(table: object, data_bytes: int = DATA_BYTES) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def entry(begin: int = 0, stop: int = DATA_BYTES, shape: object = (3, 40, 6), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


# Reading


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


def test_a_failing_disk_is_a_sentence(tmp_path, case, x_BSD, monkeypatch, refusal):
    source = open_source(save(tmp_path / "x.npy", x_BSD), case)
    into_BSD = torch.empty(3, 40, 6)
    source.read(ALL, into_BSD)

    def failing_preadv(fd, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing_preadv)
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
        source = open_source(tmp_path / name, case)
        assert source.describe() == told
        source.close()


# What is no input at all


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
    assert refusal(open_source, path, case, tensor) == (f"{path} {message}", hint or "copy or write it again")
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


# .npy: wrong length, shape, dtype, order


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
    assert refusal(open_source, path, case) == (f"{path} {message}", "copy or write it again")
    path.write_bytes(whole)
    assert torch.equal(read_all(path, case), x_BSD)


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
        ((120, 6), "[120 × 6]", "save it with 3 dimensions: batch_size, seq_len, d_model"),
        ((3, 40, 3, 2), "[3 × 40 × 3 × 2]", "save it with 3 dimensions: batch_size, seq_len, d_model"),
        ((6, 20, 6), "[6 × 20 × 6]", "batch_size is 6 in the file and 3 in the case: mend one of them"),
        ((3, 60, 4), "[3 × 60 × 4]", "seq_len is 60 in the file and 40 in the case: mend one of them"),
        ((3, 40, 7), "[3 × 40 × 7]", "d_model is 7 in the file and 6 in the case: mend one of them"),
        ((0, 40, 6), "[0 × 40 × 6]", "batch_size is 0 in the file and 3 in the case: mend one of them"),
        ((1,) * 9, "[1 × 1 × 1 × 1 × 1 × 1 × … (9 sizes)]", "save it with 3 dimensions: batch_size, seq_len, d_model"),
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


@pytest.mark.parametrize(
    ("dtype", "message", "hint"),
    [
        ("<f8", "has dtype <f8 (float64), this reads <f4 or <f2", "save x.astype('<f4')"),
        ("<i4", "has dtype <i4 (int32), this reads <f4 or <f2", "save x.astype('<f4')"),
        (">f4", "has dtype >f4 (float32), this reads <f4 or <f2", "save x.astype('<f4')"),
        ("?", "has dtype |b1 (bool), this reads <f4 or <f2", "save x.astype('<f4')"),
        ("f4,f4", "has dtype |V8 (void64), this reads <f4 or <f2", "save x.astype('<f4')"),
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


# .npy: hostile headers

NO_SHAPE = "has a broken header: it gives a shape that no array can have"


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
        (npy_header(f"({'9' * 5000},)"), "has a broken header: "),
        (npy_header("(3, 40, 6.0)"), "has a broken header: "),
        (npy_header("__import__('os').mkdir('bang')"), "has a broken header: "),
        (npy_header("(" * 300 + ")" * 300), "has a broken header: "),
        (npy_header(descr="'<f99999999999'"), "has a broken header: "),
        (npy_header(descr="5"), "has a broken header: "),
        (npy_header(descr="('<f4', (9999999999999999999999,))"), "has a broken header: "),
        (npy_header(fortran="0"), "has a broken header: "),
        ("[]", "has a broken header: "),
        ("", "has a broken header: "),
        ("\0" * 100, "has a broken header: "),
        ("{'descr': '<f4'}", "has a broken header: "),
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
        (
            1,
            9000,
            "is cut short inside its header: at least 9,010 bytes expected, 2,954 found",
            "copy or write it again",
        ),
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
            except files.DataError as reason:
                assert reason.hint and str(reason).startswith(str(path))
                refused += 1
            else:
                assert torch.equal(found, x_BSD)
    assert refused > 200


# .safetensors


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"x": entry(0, DATA_BYTES + 4)},
            "the shape and dtype of 'x' need 2,880 bytes, its data_offsets leave 2,884",
        ),
        ({"x": entry(shape=(3, 40, 3))}, "the shape and dtype of 'x' need 1,440 bytes, its data_offsets leave 2,880"),
        ({"x": entry(dtype="F16")}, "the shape and dtype of 'x' need 1,440 bytes, its data_offsets leave 2,880"),
        (
            {"x": entry(4, DATA_BYTES + 4)},
            "places 'x' at bytes 4 to 2,884 of its data, what lies before it ends at 0",
        ),
        (
            {"x": entry(), "y": entry(0, DATA_BYTES)},
            "places 'y' at bytes 0 to 2,880 of its data, what lies before it ends at 2,880",
        ),
        (
            {"x": entry(), "y": entry(2000, DATA_BYTES, (220,))},
            "places 'y' at bytes 2,000 to 2,880 of its data, what lies before it ends at 2,880",
        ),
        (
            {"x": entry(), "y": entry(DATA_BYTES, 8, (1,))},
            "places 'y' at bytes 2,880 to 8 of its data, what lies before it ends at 2,880",
        ),
        ({"x": entry(-4, DATA_BYTES)}, NO_SHAPE),
        ({"x": entry(0, 1 << 63)}, NO_SHAPE),
        ({"x": entry(shape=(3, -40, 6))}, NO_SHAPE),
        ({"x": entry(shape="abc")}, NO_SHAPE),
        ({"x": entry(shape=[1] * 65)}, NO_SHAPE),
        ({"x": {"dtype": "F32", "shape": [3, 40, 6]}}, "has a broken header: KeyError: 'data_offsets'"),
        ({"x": 5}, "has a broken header: TypeError: 'int' object is not subscriptable"),
        ([], "has a broken header: TypeError: it holds no table of tensors"),
        (b'{"x": 1, "x": 1}', "has a broken header: ValueError: a key stands there twice"),
        (b"{", "has a broken header: JSONDecodeError: "),
        (b"\xff", "has a broken header: UnicodeDecodeError: "),
        (b"[" * 200_000, "has a broken header: RecursionError: "),
        (b'{"x": ' + b"9" * 5000 + b"}", "has a broken header: ValueError: "),
    ],
)
def test_a_lying_safetensors_header_is_refused(tmp_path, case, refusal, table, message):
    path = tmp_path / "x.safetensors"
    end_bytes = max((e["data_offsets"][1] for e in table.values()), default=0) if "need" in message else DATA_BYTES
    path.write_bytes(safetensors_bytes(table, end_bytes))
    told, hint = refusal(open_source, path, case)
    assert told.removeprefix(str(path)).lstrip(": ").startswith(message) and "\n" not in told
    assert hint == AGAIN_SAFETENSORS
    path.write_bytes(safetensors_bytes({"x": entry(), "__metadata__": {"made": "here"}}))
    assert not read_all(path, case).any()


@pytest.mark.parametrize("cut_bytes", [1, DATA_BYTES // 2, DATA_BYTES, DATA_BYTES + 1, DATA_BYTES + 60])
def test_a_safetensors_file_cut_short_anywhere_is_refused(tmp_path, case, x_BSD, refusal, cut_bytes):
    path = save(tmp_path / "x.safetensors", x_BSD)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut_bytes])
    where = f": {len(whole):,}"
    if cut_bytes > DATA_BYTES:
        where = f" inside its header: at least {len(whole) - DATA_BYTES:,}"
    assert refusal(open_source, path, case) == (
        f"{path} is cut short{where} bytes expected, {len(whole) - cut_bytes:,} found",
        "copy or write it again",
    )
    path.write_bytes(whole)
    assert torch.equal(read_all(path, case), x_BSD)


@pytest.mark.parametrize("claimed_bytes", [(1 << 64) - 1, (8 << 20) + 1])
def test_a_safetensors_header_of_a_giant_claimed_length_is_not_believed(tmp_path, case, refusal, claimed_bytes):
    path = tmp_path / "x.safetensors"
    data = safetensors_bytes({"x": entry()})
    path.write_bytes(struct.pack("<Q", claimed_bytes) + data[8:])
    assert refusal(open_source, path, case) == (
        f"{path} claims a header of {claimed_bytes:,} bytes, at most 8,388,608 are read",
        AGAIN_SAFETENSORS,
    )
    path.write_bytes(data)
    open_source(path, case).close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_a_safetensors_dtype_that_is_not_read_is_refused(tmp_path, case, refusal, dtype):
    path = save(tmp_path / "x.safetensors", torch.zeros(3, 40, 6, dtype=dtype))
    name = {torch.float64: "F64", torch.int32: "I32", torch.bool: "BOOL"}[dtype]
    assert refusal(open_source, path, case) == (
        f"{path}: 'x' has dtype '{name}', this reads F32 or F16 or BF16",
        "save x.float()",
    )
    save(path, torch.zeros(3, 40, 6))
    open_source(path, case).close()


@pytest.mark.parametrize(
    ("names", "asked", "chosen"),
    [
        (["x"], None, "x"),
        (["input", "a"], None, "input"),
        (["a", "x", "b"], None, "x"),
        (["a"], None, "a"),
        (["a", "flat"], None, "a"),
        (["a", "b"], "b", "b"),
        (["x", "b"], "b", "b"),
    ],
)
def test_the_right_tensor_is_chosen(tmp_path, case, x_BSD, names, asked, chosen):
    path = tmp_path / "x.safetensors"
    tensors = {name: x_BSD + number for number, name in enumerate(names)}
    if "flat" in tensors:
        tensors["flat"] = tensors["flat"].view(-1)
    save_file(tensors, path)
    found = read_all(path, case, asked)
    assert torch.equal(found, tensors[chosen])
    assert not any(torch.equal(found, other) for name, other in tensors.items() if name != chosen)


@pytest.mark.parametrize(
    ("names", "asked", "message", "hint"),
    [
        (["a", "b"], None, "does not show which tensor is the input: it holds 'a', 'b'", "name it, or save it as `x`"),
        (
            ["x", "input"],
            None,
            "does not show which tensor is the input: it holds 'x', 'input'",
            "name it, or save it as `x`",
        ),
        ([], None, "does not show which tensor is the input: it holds none", "name it, or save it as `x`"),
        (["hidden", "b"], "hiden", "has no tensor 'hiden': it holds 'hidden', 'b'", "did you mean 'hidden'?"),
        (["x"], "zzz", "has no tensor 'zzz': it holds 'x'", "name one that is there"),
        (
            [f"t{n}" for n in range(10)],
            "zzz",
            "has no tensor 'zzz': it holds 't0', 't1', 't2', 't3', 't4', 't5', 't6', 't7' and 2 more",
            "name one that is there",
        ),
    ],
)
def test_a_tensor_that_is_not_there_or_not_clear_is_asked_for_by_name(
    tmp_path, case, refusal, names, asked, message, hint
):
    path = tmp_path / "x.safetensors"
    table = {name: entry(n * DATA_BYTES, (n + 1) * DATA_BYTES) for n, name in enumerate(names)}
    path.write_bytes(safetensors_bytes(table, len(names) * DATA_BYTES))
    assert refusal(open_source, path, case, asked) == (f"{path} {message}", hint)
    for name in names:
        open_source(path, case, name).close()


def test_the_only_tensor_is_taken_for_the_input_and_its_shape_is_what_is_wrong(tmp_path, case, x_BSD, refusal):
    path = tmp_path / "x.safetensors"
    save_file({"flat": x_BSD.view(120, 6)}, path)
    assert refusal(open_source, path, case) == (
        f"{path} has shape [120 × 6], case small needs [3 × 40 × 6] (batch_size, seq_len, d_model)",
        "save it with 3 dimensions: batch_size, seq_len, d_model",
    )
    save_file({"flat": x_BSD.view(120, 6), "flatter": x_BSD.view(720).clone()}, path)
    assert refusal(open_source, path, case)[0].endswith("the input: it holds 'flat', 'flatter'")


# A file that changes while it is read


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
