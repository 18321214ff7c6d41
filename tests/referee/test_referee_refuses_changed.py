"""What was hashed must still be what it was; what is called seeded must come from its seed."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import Result

from referee import judge
from referee.errors import CannotJudge
from referee.inputs import seeded_weights
from referee.prove import Run, Wrong, small_runs

WEIGHTS, OUTPUT = "weights.safetensors", "watched/row_00000001.npy"


def flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def row_hash(row_SD: np.ndarray) -> str:
    blocks = [row_SD[start : start + 4096].astype("<f4").tobytes() for start in range(0, len(row_SD), 4096)]
    return hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()


def test_an_untouched_run_is_judged(check: Callable[..., Result]) -> None:
    assert check().exit_code == 0


@pytest.mark.parametrize("name", [WEIGHTS, OUTPUT])
def test_a_flipped_bit_is_refused(name: str, run_dir: Path, refused: Callable[..., str]) -> None:
    flip_last_bit(run_dir / name)
    assert refused().startswith(f"{Path(name).name} hashes to ")


def test_another_input_is_refused(edit: Callable, refused: Callable[..., str]) -> None:
    edit(lambda manifest: manifest["watched"][1].update(input_sha256="0" * 64))
    assert refused().startswith("the input of row 1 hashes to ")


def test_only_the_rows_to_judge_need_to_agree(edit: Callable, check: Callable, refused: Callable[..., str]) -> None:
    edit(lambda manifest: manifest["watched"][1].update(input_sha256="0" * 64))
    assert check("--rows", "0").exit_code == 0
    assert "input of row 1" in refused("--rows", "0,1")


def test_weights_of_another_seed_are_refused(run_dir: Path, tiny_run: Run, edit: Callable, refused: Callable) -> None:
    safetensors.torch.save_file(seeded_weights(replace(tiny_run.case, seed=6)), run_dir / WEIGHTS)
    sha256 = hashlib.sha256((run_dir / WEIGHTS).read_bytes()).hexdigest()
    edit(lambda manifest: manifest["weights"].update(sha256=sha256))
    assert "should come from seed 5, but layers.0.attention.q_proj.weight does not" in refused()


def test_a_flipped_sign_of_a_zero_weight_is_refused(
    run_dir: Path, tiny_run: Run, edit: Callable, refused: Callable
) -> None:
    weights = dict(tiny_run.weights)
    weights["final_norm.bias"] = -weights["final_norm.bias"]  # equal as numbers, not bit for bit
    safetensors.torch.save_file(weights, run_dir / WEIGHTS)
    sha256 = hashlib.sha256((run_dir / WEIGHTS).read_bytes()).hexdigest()
    edit(lambda manifest: manifest["weights"].update(sha256=sha256))
    assert "but final_norm.bias does not" in refused()


def test_an_earlier_verdict_does_not_outlive_a_change(run_dir: Path, check: Callable, refused: Callable) -> None:
    assert check().exit_code == 0
    assert (run_dir / "verdict.json").exists()
    flip_last_bit(run_dir / OUTPUT)
    refused()
    assert not (run_dir / "verdict.json").exists()


def test_an_earlier_verdict_outlives_a_wish_but_not_a_broken_manifest(run_dir: Path, check: Callable) -> None:
    check()
    assert check("--rows", "7").exit_code == 2
    assert (run_dir / "verdict.json").exists()
    (run_dir / "manifest.json").write_text("{")
    assert check().exit_code == 2
    assert not (run_dir / "verdict.json").exists()


def test_a_changed_mask_is_refused(tmp_path: Path) -> None:
    run = small_runs()["masked"]
    run.write(tmp_path / "run", run.outputs(Wrong()))
    assert judge(tmp_path / "run")["verdict"] == "pass"
    flip_last_bit(tmp_path / "run/mask.npy")
    with pytest.raises(CannotJudge, match=r"mask.npy hashes to "):
        judge(tmp_path / "run")


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_users_input_is_read_widened_and_hashed(dtype: str, suffix: str, tmp_path: Path, tiny_run: Run) -> None:
    x = tiny_run.inputs().numpy().astype(dtype)
    path = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(path, x)
    else:
        safetensors.torch.save_file({"x": torch.from_numpy(x), "y": torch.zeros(1)}, path)
    run_dir = tmp_path / "run"
    tiny_run.write(run_dir, tiny_run.outputs(Wrong()))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest["input"] = {"kind": "file", "path": str(path)} | ({"tensor": "x"} if suffix == "safetensors" else {})
    for entry in manifest["watched"]:
        entry["input_sha256"] = row_hash(x[entry["row"]].astype("<f4"))
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    assert judge(run_dir)["verdict"] == "pass"
    flip_last_bit(path) if suffix == "npy" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CannotJudge, match=r"input of row 1 hashes to|no whole safetensors file"):
        judge(run_dir)
    path.unlink()
    with pytest.raises(CannotJudge, match="is not there"):
        judge(run_dir)


def test_rows_longer_than_a_block_hash_block_by_block() -> None:
    from referee.crew import Crew
    from referee.inputs import hash_row

    row = np.random.default_rng(1).standard_normal((9000, 3), dtype="float32")
    with Crew(2) as crew:
        assert hash_row(row, crew) == row_hash(row)
        assert hash_row(row[:-1], crew) != row_hash(row)
