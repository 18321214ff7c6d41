"""A hostile or damaged run directory ends in one sentence and exit 2: no verdict, no crash, no big allocation."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

OUTPUT, WEIGHTS = "watched/row_00000000.npy", "weights.safetensors"


@pytest.mark.parametrize("path", ["../outside.npy", "watched/../../outside.npy", "/etc/hostname", "watched/link.npy"])
def test_a_path_that_leaves_the_directory_is_refused(
    path: str, run_dir: Path, edit: Callable, refused: Callable
) -> None:
    (run_dir.parent / "outside.npy").write_bytes((run_dir / OUTPUT).read_bytes())
    (run_dir / "watched/link.npy").symlink_to(run_dir.parent / "outside.npy")
    edit(lambda manifest: manifest["watched"][0].update(output=path))
    assert refused() == f"the path '{path}' leaves the run directory"


@pytest.mark.parametrize("name", [WEIGHTS, "manifest.json"])
def test_a_link_out_of_the_directory_is_refused(name: str, run_dir: Path, refused: Callable) -> None:
    (run_dir / name).rename(run_dir.parent / "outside")
    (run_dir / name).symlink_to(run_dir.parent / "outside")
    assert refused() == f"the path '{name}' leaves the run directory"


def test_an_absolute_path_is_refused_even_inside(run_dir: Path, edit: Callable, refused: Callable) -> None:
    path = str((run_dir / OUTPUT).resolve())
    edit(lambda manifest: manifest["watched"][0].update(output=path))
    assert refused() == f"the path '{path}' leaves the run directory"


def test_a_detour_that_stays_inside_is_welcome(edit: Callable, check: Callable) -> None:
    edit(lambda manifest: manifest["watched"][0].update(output=f"watched/../{OUTPUT}"))
    assert check().exit_code == 0


@pytest.mark.parametrize("path", ["", ".", "watched", "no/such.npy", "nul\0.npy", "x" * 5000])
def test_a_path_to_no_file_is_refused(path: str, edit: Callable, refused: Callable) -> None:
    edit(lambda manifest: manifest["watched"][0].update(output=path))
    assert "missing from" in (said := refused()) or "is no usable path" in said


@pytest.mark.parametrize("name", [OUTPUT, WEIGHTS, "manifest.json"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_truncated_file_is_refused(name: str, share: float, run_dir: Path, refused: Callable) -> None:
    raw = (run_dir / name).read_bytes()
    (run_dir / name).write_bytes(raw[: min(int(share * len(raw)), len(raw) - 1)])
    assert Path(name).name in refused()


@pytest.mark.parametrize("name", [OUTPUT, WEIGHTS])
def test_bytes_too_many_are_refused(name: str, run_dir: Path, refused: Callable) -> None:
    with (run_dir / name).open("ab") as file:
        file.write(b"\0")
    assert Path(name).name in refused()


def npy(header: str, version: bytes = b"\x01\x00") -> bytes:
    size = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + version + size + header.encode()


DESCRIPTION = "{'descr': '<f4', 'fortran_order': False, 'shape': (40, 16), }"


@pytest.mark.parametrize(
    "raw",
    [
        b"no npy at all",
        npy(DESCRIPTION, b"\x09\x00"),
        npy(DESCRIPTION.replace("(40, 16)", f"({2**40}, {2**40})")),
        npy(DESCRIPTION.replace("(40, 16)", "(-40, -16)")),
        npy(DESCRIPTION.replace("<f4", "|O")) + pickle.dumps([0]),
        npy(DESCRIPTION.replace("<f4", "<f8")) + bytes(40 * 16 * 8),
        npy(DESCRIPTION.replace("False", "True")) + bytes(40 * 16 * 4),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (40, 16"),
        npy("__import__('os').abort()"),
        npy("(" * 3000),
        npy("-" * 3000 + "1"),
        npy("{'a': " * 600),
        npy("'''", b"\x01\x00"),
        npy(" " * 60_000),
        npy(DESCRIPTION, b"\x02\x00"),
    ],
    ids=range(15),
)
def test_a_malformed_npy_is_refused(raw: bytes, run_dir: Path, refused: Callable) -> None:
    (run_dir / OUTPUT).write_bytes(raw)
    assert refused().startswith("row_00000000.npy is no whole npy file: ")


def test_damaged_headers_never_crash(run_dir: Path, check: Callable) -> None:
    raw, random, codes = (run_dir / OUTPUT).read_bytes(), np.random.default_rng(0), []
    for _ in range(100):
        spoilt = bytearray(raw)
        spoilt[random.integers(0, 64)] = random.integers(0, 256)
        (run_dir / OUTPUT).write_bytes(spoilt)
        result = check("--quiet", "--rows", "0", "--positions", "1")
        assert "Traceback" not in result.stderr
        codes.append(result.exit_code)
    assert set(codes) <= {0, 2}  # 0: another spelling of the same header; the numbers are untouched
    assert codes.count(2) > 80


@pytest.mark.parametrize("header_bytes", [0, 5, 2**62])
def test_a_malformed_safetensors_is_refused(header_bytes: int, run_dir: Path, refused: Callable) -> None:
    raw = bytearray((run_dir / WEIGHTS).read_bytes())
    raw[:8] = struct.pack("<Q", header_bytes)
    (run_dir / WEIGHTS).write_bytes(raw)
    assert refused().startswith("weights.safetensors is no whole safetensors file: ")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w.pop("final_norm.bias"), "lacks final_norm.bias, and has besides what it needs nothing"),
        (lambda w: w.update(extra=torch.zeros(1)), "lacks nothing, and has besides what it needs extra"),
        (
            lambda w: w.update({"final_norm.bias": torch.zeros(4, 4)}),
            r"is torch.float32[4, 4], expected torch.float32[16]",
        ),
        (lambda w: w.update({"final_norm.bias": torch.zeros(16, dtype=torch.int32)}), "is torch.int32[16], expected"),
    ],
)
def test_weights_of_the_wrong_names_or_shapes_are_refused(
    spoil: Callable, said: str, run_dir: Path, tiny_run: Any, refused: Callable
) -> None:
    weights = dict(tiny_run.weights)
    spoil(weights)
    safetensors.torch.save_file(weights, run_dir / WEIGHTS)
    assert said in refused()


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"{", b"\xff\xfe\xfd", b"[" * 100_000, b"1" * 5000, b'{"schema": 2}']
)
def test_malformed_json_is_refused(raw: bytes, run_dir: Path, refused: Callable) -> None:
    (run_dir / "manifest.json").write_bytes(raw)
    assert refused().startswith(("manifest.json", "run"))


SPOILT_FIELDS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("complete",), False, "the run is not complete"),
    (("complete",), 1, "`complete` should be true or false, found 1"),
    (("case", "seq_len"), -1, "`seq_len` should be a whole number of 1 to "),
    (("case", "seq_len"), 40.0, "`seq_len` should be a whole number"),
    (("case", "seq_len"), 2**40, "row_00000000.npy is no whole npy file: found <f4[40, 16], expected"),
    (("case", "seq_len"), True, "`seq_len` should be a whole number"),
    (("case", "d_model"), 2**40, "row_00000000.npy is no whole npy file: found <f4[40, 16], expected"),
    (("case", "ffn_dim"), 2**40, "where the case needs 145,135,534,871,232 for its weights"),
    (("case", "layers"), 10**9, "`layers` should be a whole number of 1 to 4,096"),
    (("case", "heads"), 3, "16 channels do not split into 3 heads"),
    (("case", "atol"), float("nan"), "`atol` should be a finite number"),
    (("case", "atol"), 0, "are no rule"),
    (("case", "causal"), "yes", "`causal` should be true or false, found 'yes'"),
    (("weights", "kind"), "guessed", "unknown kind 'guessed'"),
    (("weights", "sha256"), "ABC", "`sha256` is no SHA-256: 'ABC'"),
    (("input",), {"kind": "file"}, "has no `path`"),
    (("input",), {"kind": "file", "path": "/x.bin"}, "is not there"),
    (("mask",), {"sha256": "0" * 64}, "mask.npy is missing"),
    (("mask",), [], "`mask` should be a table, found []"),
    (("watched",), [], "the run watched no rows"),
    (("watched", 1, "row"), 0, "row 0 stands there twice"),
    (("watched", 1, "row"), 2, "row 2 is beyond the batch of 2"),
    (("watched", 1), "row 1", "`entry` should be a table"),
]


@pytest.mark.parametrize(("place", "value", "said"), SPOILT_FIELDS)
def test_a_wrong_field_is_refused_by_name(
    place: tuple[Any, ...], value: object, said: str, edit: Callable, refused: Callable
) -> None:
    def spoil(manifest: dict[str, Any]) -> None:
        *way, last = place
        for key in way:
            manifest = manifest[key]
        manifest[last] = value

    edit(spoil)
    assert said in refused()


def test_every_missing_field_is_refused_by_name(run_dir: Path, refused: Callable) -> None:
    path = run_dir / "manifest.json"
    whole = path.read_text()
    needed = [("case", key) for key in ("name", "batch_size", "seq_len", "d_model", "heads", "ffn_dim", "layers")]
    needed += [("case",), ("input",), ("weights",), ("watched",), ("complete",), ("watched", 0, "output_sha256")]
    for *way, last in needed:
        manifest = json.loads(whole)
        table = manifest
        for key in way:
            table = table[key]
        del table[last]
        path.write_text(json.dumps(manifest))
        said = refused()
        assert f"has no `{last}`" in said or "watched no rows" in said


def test_no_run_directory_is_refused(run_dir: Path, refused: Callable) -> None:
    (run_dir / "manifest.json").unlink()
    assert refused() == f"{run_dir} is no run directory: no manifest.json"
