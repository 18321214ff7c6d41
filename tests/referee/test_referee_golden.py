"""What is seeded agrees with numbers written down beforehand, without the referee's code."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from referee.case import Case
from referee.crew import Crew
from referee.inputs import block_seed, hash_row, seeded_block, seeded_weights, weight_shapes

GOLDEN = Path(__file__).parent.parent / "golden"
BLOCKS = json.loads((GOLDEN / "seeded_blocks.json").read_text())
ROWS = json.loads((GOLDEN / "row_hashes.json").read_text())
WEIGHTS = json.loads((GOLDEN / "seeded_weights.json").read_text())


def make_case(seed: int, seq_len: int = 4096, **sizes: float) -> Case:
    shape = {"d_model": 64, "heads": 4, "ffn_dim": 96, "layers": 2, "input_scale": 1.0, **sizes}
    rest = {"name": "golden", "batch_size": 10_000, "causal": True, "atol": 2e-3, "rtol": 2e-2}
    return Case(seed=seed, seq_len=seq_len, **shape, **rest)


@pytest.mark.parametrize("entry", BLOCKS)
def test_generator_seeds_are_exact(entry: dict) -> None:
    assert block_seed(entry["seed"], entry["row"], entry["block"]) == entry["generator_seed"]
    assert block_seed(entry["seed"], entry["row"] + 1, entry["block"]) != entry["generator_seed"]


@pytest.mark.parametrize("entry", BLOCKS)
def test_blocks_begin_with_the_golden_values(entry: dict) -> None:
    case = make_case(entry["seed"], seq_len=4096 * (entry["block"] + 1))
    block = seeded_block(case, entry["row"], entry["block"])
    wanted = torch.tensor(entry["first_8_of_4096x64"])
    assert block.shape == (4096, 64)
    assert block.dtype == torch.float32
    assert (block.flatten()[:8] - wanted).abs().max() < 1e-6
    other = seeded_block(case, entry["row"] + 1, entry["block"])  # control
    assert (other.flatten()[:8] - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("entry", BLOCKS)
def test_whole_blocks_are_golden_where_the_last_bit_is(entry: dict) -> None:
    case = make_case(entry["seed"], seq_len=4096 * (entry["block"] + 1))
    block = seeded_block(case, entry["row"], entry["block"])
    assert float(block.double().sum()) == pytest.approx(entry["sum_of_4096x64"], abs=0.02)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # the kinds of CPU that made it
        assert hashlib.sha256(block.numpy().tobytes()).hexdigest() == entry["sha256_of_4096x64"]


@pytest.mark.parametrize("entry", ROWS)
def test_rows_hash_to_golden_values_exactly(entry: dict) -> None:
    values = np.arange(entry["positions"] * entry["width"], dtype="<f4") / 256
    row = values.reshape(entry["positions"], entry["width"])
    with Crew(2) as crew:
        assert hash_row(row, crew) == entry["sha256"]
        assert hash_row(row[:, ::-1], crew) != entry["sha256"]  # control


def test_blocks_are_scaled() -> None:
    plain, scaled = seeded_block(make_case(3), 1, 0), seeded_block(make_case(3, input_scale=0.5), 1, 0)
    assert torch.equal(scaled, plain * 0.5)


def test_a_short_last_block_draws_what_it_needs() -> None:
    short = seeded_block(make_case(3, seq_len=4096 + 5), 1, 1)
    generator = torch.Generator().manual_seed(block_seed(3, 1, 1))
    assert torch.equal(short, torch.randn(5, 64, generator=generator))


def test_weights_begin_with_the_golden_values() -> None:
    made, other = seeded_weights(make_case(1234)), seeded_weights(make_case(1235))
    assert list(made) == list(WEIGHTS["first_8"]) == list(weight_shapes(make_case(1234)))
    for name, wanted in WEIGHTS["first_8"].items():
        assert (made[name].flatten()[:8] - torch.tensor(wanted)).abs().max() < 1e-6, name
    name = "layers.1.ffn_in.weight"
    assert (other[name].flatten()[:8] - made[name].flatten()[:8]).abs().max() > 1e-3  # control


def test_making_weights_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(99)
    wanted = torch.randn(3)
    torch.manual_seed(99)
    seeded_weights(make_case(1234))
    assert torch.equal(torch.randn(3), wanted)
