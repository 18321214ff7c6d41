"""The right tensor of a .safetensors file is read, and a file that lies or does not show which is refused."""

import struct

import pytest
import torch
from input_files import (
    AGAIN_SAFETENSORS,
    BROKEN,
    CUT_SHORT,
    DATA_BYTES,
    NO_SHAPE,
    THREE_DIMENSIONS,
    entry,
    read_all,
    safetensors_bytes,
    save,
)
from safetensors.torch import save_file

from frontier.data.files import open_source

NOT_CLEAR = "does not show which tensor is the input: it holds "
NAME_IT = "name it, or save it as `x`"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": entry(0, DATA_BYTES + 4)}, "the shape and dtype of 'x' need 2,880 bytes, its data_offsets leave 2,884"),
        ({"x": entry(shape=(3, 40, 3))}, "the shape and dtype of 'x' need 1,440 bytes, its data_offsets leave 2,880"),
        ({"x": entry(dtype="F16")}, "the shape and dtype of 'x' need 1,440 bytes, its data_offsets leave 2,880"),
        ({"x": entry(4, DATA_BYTES + 4)}, "places 'x' at bytes 4 to 2,884 of its data, what lies before it ends at 0"),
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
        ({"x": {"dtype": "F32", "shape": [3, 40, 6]}}, BROKEN + "KeyError: 'data_offsets'"),
        ({"x": 5}, BROKEN + "TypeError: 'int' object is not subscriptable"),
        ([], BROKEN + "TypeError: it holds no table of tensors"),
        (b'{"x": 1, "x": 1}', BROKEN + "ValueError: a key stands there twice"),
        (b"{", BROKEN + "JSONDecodeError: "),
        (b"\xff", BROKEN + "UnicodeDecodeError: "),
        (b"[" * 200_000, BROKEN + "RecursionError: "),
        (b'{"x": ' + b"9" * 5000 + b"}", BROKEN + "ValueError: "),
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
        CUT_SHORT,
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
        (["a", "b"], None, NOT_CLEAR + "'a', 'b'", NAME_IT),
        (["x", "input"], None, NOT_CLEAR + "'x', 'input'", NAME_IT),
        ([], None, NOT_CLEAR + "none", NAME_IT),
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
        THREE_DIMENSIONS,
    )
    save_file({"flat": x_BSD.view(120, 6), "flatter": x_BSD.view(720).clone()}, path)
    assert refusal(open_source, path, case)[0].endswith("the input: it holds 'flat', 'flatter'")
