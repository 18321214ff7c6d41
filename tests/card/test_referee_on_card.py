"""The referee's float64 path on a card is its CPU path to 1e-10, and holds no more there than it said."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from referee.card import Card, open_device
from referee.case import Case
from referee.cli import cli
from referee.crew import Crew
from referee.inputs import seeded_block, seeded_weights
from referee.layer import Shape, run_stack
from referee.prove import Run, Wrong

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
CASE = Case(
    name="card", batch_size=1, seq_len=1501, d_model=256, heads=4, ffn_dim=384, layers=2, causal=True, seed=11,
    input_scale=1.0, atol=2e-3, rtol=2e-2,
)  # fmt: skip


def shape_of(case: Case, causal: bool = True) -> Shape:
    return Shape(layers=case.layers, heads=case.heads, d_model=case.d_model, ffn_dim=case.ffn_dim, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("most_bytes", [100 << 20, 2 << 30])
def test_the_card_is_the_cpu_to_1e_10(most_bytes: int, causal: bool) -> None:
    x_SD, weights, picked_P = seeded_block(CASE, 0, 0), seeded_weights(CASE), torch.arange(0, 1501, 3)
    found_PD = Card(open_device("cuda"), shape_of(CASE, causal), most_bytes).run_stack(x_SD, picked_P, weights)
    with Crew(2) as crew:
        wants_PD = run_stack(x_SD, picked_P, weights, shape_of(CASE, causal), crew, 1 << 28)
    assert (found_PD - wants_PD).abs().max() < 1e-10


def test_the_card_holds_no_more_than_it_said() -> None:
    device, case = open_device("cuda"), replace(CASE, seq_len=40_000)
    card = Card(device, shape_of(case), 512 << 20)
    x_SD, weights = torch.randn(40_000, 256), seeded_weights(case)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    card.run_stack(x_SD, torch.arange(39_000, 40_000), weights)
    held_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    assert 0.3 * card.held_bytes() < held_bytes <= card.held_bytes() <= 512 << 20


def test_the_estimate_is_near_the_time() -> None:
    card = Card(open_device("cuda"), shape_of(CASE), 1 << 30)
    x_SD, weights, picked_P = torch.randn(100_000, 256), seeded_weights(CASE), torch.arange(100_000)
    (flops, exps), (flops_per_s, exps_per_s) = card.count_work(100_000, picked_P), card.measure()
    estimated_s, begun_s = flops / flops_per_s + exps / exps_per_s, time.monotonic()
    card.run_stack(x_SD, picked_P, weights)
    # What it must catch is a term or a unit left out: other work on the card while it measures counts for twice.
    assert 0.2 < (time.monotonic() - begun_s) / estimated_s < 5


def test_check_judges_a_run_on_the_card(tmp_path: Path) -> None:
    run = Run(case=CASE, weights=seeded_weights(CASE))
    y_BSD = run.outputs(Wrong())
    for name, exit_code in (("faithful", 0), ("spoilt", 1)):
        run.write(tmp_path / name, y_BSD)
        result = CliRunner().invoke(cli, ["check", str(tmp_path / name), "--device", "cuda", "--memory", "512MiB"])
        assert result.exit_code == exit_code, result.output
        y_BSD[0, 700, 9] += 1
