"""Rows and weights, made from the contract's seeding or hashed by its rule.

Takes    a checked manifest.
Gives    a row's input, the weights, and the hash of a row.
Knows nothing of the formula, of outputs or of verdicts.

Letters  S positions, D width.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from referee.case import Case
from referee.crew import Crew
from referee.errors import CannotJudge
from referee.files import Shape, read_user_row, read_weights
from referee.manifest import Manifest

BLOCK_POSITIONS = 4096


def block_seed(seed: int, row: int, block: int) -> int:
    """The generator seed of one block of one row."""
    digest = hashlib.sha256(f"frontier/1/{seed}/{row}/{block}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big") & (2**63 - 1)


def seeded_block(case: Case, row: int, block: int) -> Tensor:
    """Positions `[4096 block, 4096 (block + 1))` of a row, as far as the sequence reaches, float32."""
    positions = min(BLOCK_POSITIONS, case.seq_len - block * BLOCK_POSITIONS)
    generator = torch.Generator("cpu").manual_seed(block_seed(case.seed, row, block))
    return torch.randn(positions, case.d_model, generator=generator, dtype=torch.float32) * case.input_scale


def read_row(manifest: Manifest, row: int, crew: Crew) -> Tensor:
    """The input of a row, `[S, D]` float32: generated, or read from the user's file."""
    case = manifest.case
    if manifest.input_path is not None:
        shape = (case.batch_size, case.seq_len, case.d_model)
        return read_user_row(manifest.input_path, manifest.input_tensor, shape, row)
    row_SD = torch.empty(case.seq_len, case.d_model)

    def fill(start: int) -> None:
        row_SD[start : start + BLOCK_POSITIONS] = seeded_block(case, row, start // BLOCK_POSITIONS)

    crew.map(fill, range(0, case.seq_len, BLOCK_POSITIONS))
    return row_SD


def hash_row(row_SD: np.ndarray[Any, Any], crew: Crew) -> str:
    """SHA-256 over the SHA-256 digests of the row's blocks of 4,096 positions."""

    def digest(start: int) -> bytes:
        block = np.ascontiguousarray(row_SD[start : start + BLOCK_POSITIONS], dtype="<f4")
        return hashlib.sha256(block.data.cast("B")).digest()

    return hashlib.sha256(b"".join(crew.map(digest, range(0, len(row_SD), BLOCK_POSITIONS)))).hexdigest()


def weight_shapes(case: Case) -> dict[str, Shape]:
    """Every weight's name and shape, in the order in which seeded weights are made."""
    d, f = case.d_model, case.ffn_dim
    linears = {f"attention.{part}_proj": (d, d) for part in ("q", "k", "v", "out")}
    one_layer = {"norm1": (d,), **linears, "norm2": (d,), "ffn_in": (f, d), "ffn_out": (d, f)}
    modules = {f"layers.{i}.{name}": shape for i in range(case.layers) for name, shape in one_layer.items()}
    shapes: dict[str, Shape] = {}
    for name, shape in {**modules, "final_norm": (d,)}.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
    return shapes


def seeded_weights(case: Case) -> dict[str, Tensor]:
    """The weights that PyTorch's default initialisation gives after `torch.manual_seed(seed)`, on the CPU."""
    weights: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(case.seed)
        for name, shape in weight_shapes(case).items():
            module_name, kind = name.rsplit(".", 1)
            if kind == "weight":
                module = nn.Linear(shape[1], shape[0]) if len(shape) == 2 else nn.LayerNorm(shape[0])
                weights |= {f"{module_name}.{key}": value for key, value in module.state_dict().items()}
    return weights


def read_run_weights(manifest: Manifest) -> dict[str, Tensor]:
    """The run's weights, proven to be the file the manifest means and, if seeded, to come from the seed.

    Raises   CannotJudge.
    """
    weights, found = read_weights(manifest.weights_path, weight_shapes(manifest.case))
    hint = "the weights changed after the run; put the old ones back, or run again"
    expect_hash("weights.safetensors", found, manifest.weights_sha256, hint)
    if manifest.weights_seeded:
        for name, made in seeded_weights(manifest.case).items():
            if not torch.equal(made.view(torch.int32), weights[name].view(torch.int32)):
                raise CannotJudge(
                    f"the weights should come from seed {manifest.case.seed}, but {name} does not",
                    hint="judge on the kind of CPU of the run (PyTorch promises the last bit on no other), or run"
                    ' again; a manifest must say "file" of weights from elsewhere',
                )
    return weights


def expect_hash(what: str, found: str, wanted: str, hint: str) -> None:
    """Raises   CannotJudge, naming both hashes, unless they agree."""
    if found != wanted:
        raise CannotJudge(f"{what} hashes to {found[:12]}, the manifest says {wanted[:12]}", hint=hint)
