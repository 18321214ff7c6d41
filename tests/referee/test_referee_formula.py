"""The blocked float64 stack is the dense one, whatever the size, the bound on memory, the mask or the positions."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from referee import layer
from referee.case import Case
from referee.crew import Crew
from referee.inputs import seeded_weights
from referee.layer import Shape, block_of, run_stack
from referee.verdict import choose_positions, recompute

BASE = Case(
    name="formula", batch_size=1, seq_len=1, d_model=24, heads=3, ffn_dim=40, layers=2, causal=True, seed=3,
    input_scale=1.0, atol=2e-3, rtol=2e-2,
)  # fmt: skip
LEAST_BYTES = 8 * 2 * 16 * 8  # two threads, the smallest tiles


class DenseLayer(nn.Module):
    """One layer as PyTorch's own modules spell it, all scores at once."""

    def __init__(self, case: Case, scale: float | None) -> None:
        super().__init__()
        d, f = case.d_model, case.ffn_dim
        self.heads, self.scale = case.heads, scale
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.ModuleDict({f"{name}_proj": nn.Linear(d, d) for name in ("q", "k", "v", "out")})
        self.ffn_in, self.ffn_out = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x: Tensor, visible: Tensor, valid: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (self.attention[f"{name}_proj"](h).unflatten(-1, (self.heads, -1)).transpose(0, 1) for name in "qkv")
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        a = a.nan_to_num(0.0).transpose(0, 1).flatten(1) * valid
        x = x + self.attention["out_proj"](a)
        return (x + self.ffn_out(nn.GELU()(self.ffn_in(self.norm2(x))))) * valid


def lively_weights(case: Case) -> dict[str, Tensor]:
    """Seeded ones, with norms that differ from one another: fresh, they are all 1 and 0 and could be confused."""
    weights = seeded_weights(case)
    return {name: w + 0.3 * torch.randn_like(w) if "norm" in name else w for name, w in weights.items()}


def dense(x: Tensor, case: Case, weights: dict[str, Tensor], kept: Tensor, scale: float | None = None) -> Tensor:
    model = nn.Module()
    model.layers = nn.ModuleList(DenseLayer(case, scale) for _ in range(case.layers))
    model.final_norm = nn.LayerNorm(case.d_model)
    model.load_state_dict(weights)
    model.double()
    visible = kept[None, :].expand(len(x), -1)
    if case.causal:
        visible = visible.tril()
    with torch.no_grad():
        y = x.double()
        for one in model.layers:
            y = one(y, visible, kept[:, None])
        return model.final_norm(y) * kept[:, None]


def blocked(
    x: Tensor, case: Case, weights: dict[str, Tensor], kept: Tensor, wanted: Tensor, scores_bytes: int
) -> Tensor:
    shape = Shape(layers=case.layers, heads=case.heads, d_model=case.d_model, ffn_dim=case.ffn_dim, causal=case.causal)
    with Crew(2) as crew:
        return recompute(x, kept, wanted, lambda x, picked: run_stack(x, picked, weights, shape, crew, scores_bytes))


def gap(case: Case, kept: Tensor | None = None, count: int | None = None, scores_bytes: int = 1 << 30) -> float:
    """The largest difference between the two, at the positions that are asked for."""
    x, weights = torch.randn(case.seq_len, case.d_model), lively_weights(case)
    kept = torch.ones(case.seq_len, dtype=torch.bool) if kept is None else kept
    wanted = choose_positions(count, case.seq_len)
    found = blocked(x.clone(), case, weights, kept, wanted, scores_bytes)
    assert found.dtype == torch.float64
    return float((found - dense(x, case, weights, kept)[wanted]).abs().max())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scores_bytes", [LEAST_BYTES, 1 << 30])
@pytest.mark.parametrize("seq_len", [1, 7, 33, 129, 613])
def test_blocked_equals_dense_at_odd_sizes(seq_len: int, scores_bytes: int, causal: bool) -> None:
    assert gap(replace(BASE, seq_len=seq_len, causal=causal), scores_bytes=scores_bytes) < 1e-12


@pytest.mark.parametrize(("d_model", "heads"), [(24, 1), (24, 24), (50, 5), (256, 1)])
def test_blocked_equals_dense_for_any_head_width(d_model: int, heads: int) -> None:
    assert gap(replace(BASE, seq_len=77, d_model=d_model, heads=heads)) < 1e-12


def test_blocked_equals_dense_over_several_full_tiles() -> None:
    assert gap(replace(BASE, seq_len=1300, layers=1)) < 1e-12


MASKS = {
    "a prefix": torch.arange(101) < 60,
    "left padding": torch.arange(101) >= 37,
    "holes": torch.arange(101) % 3 != 1,
    "one valid position": torch.arange(101) == 50,
    "nothing valid": torch.zeros(101, dtype=torch.bool),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [None, 20])
@pytest.mark.parametrize("kept", MASKS.values(), ids=MASKS.keys())
def test_masks_equal_dense(kept: Tensor, count: int | None, causal: bool) -> None:
    assert gap(replace(BASE, seq_len=101, causal=causal), kept, count, LEAST_BYTES) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [1, 2, 511, 513, 600, 700])
def test_chosen_positions_equal_dense(count: int, causal: bool) -> None:
    assert gap(replace(BASE, seq_len=701, causal=causal), count=count) < 1e-12


def test_positions_are_both_ends_and_a_fixed_draw_between() -> None:
    assert choose_positions(10, 1000).tolist() == [*range(5), *range(995, 1000)]
    many = choose_positions(600, 10_000)
    assert many[:256].tolist() == list(range(256))
    assert many[-256:].tolist() == list(range(9_744, 10_000))
    assert len(set(many.tolist())) == 600
    assert many.tolist() == sorted(many.tolist()) == choose_positions(600, 10_000).tolist()
    assert choose_positions(None, 7).tolist() == choose_positions(9, 7).tolist() == list(range(7))


def test_scores_too_large_for_exp_equal_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(BASE, seq_len=90, layers=1)
    x, weights = torch.randn(90, 24), lively_weights(case)
    for part in "qk":
        weights[f"layers.0.attention.{part}_proj.weight"] *= 60
    kept = torch.ones(90, dtype=torch.bool)
    wanted, wants = torch.arange(90), dense(x, case, weights, kept)
    found = blocked(x.clone(), case, weights, kept, wanted, LEAST_BYTES)
    assert (found - wants).abs().max() < 1e-10
    monkeypatch.setattr(layer, "SAFE_SCORE", math.inf)  # control: without the maximum taken out, exp overflows
    assert not blocked(x.clone(), case, weights, kept, wanted, LEAST_BYTES).isfinite().all()


def test_the_comparison_sees_a_wrong_scale() -> None:
    case = replace(BASE, seq_len=33)
    x, weights, kept = torch.randn(33, 24), lively_weights(case), torch.ones(33, dtype=torch.bool)
    found = blocked(x.clone(), case, weights, kept, torch.arange(33), 1 << 20)
    assert (found - dense(x, case, weights, kept, scale=24**-0.5)).abs().max() > 1e-6


@pytest.mark.parametrize("name", list(seeded_weights(BASE)))
def test_the_comparison_sees_each_weight(name: str) -> None:
    case, kept, wanted = replace(BASE, seq_len=33), torch.ones(33, dtype=torch.bool), torch.arange(33)
    x, weights = torch.randn(33, 24), lively_weights(case)
    found = blocked(x.clone(), case, weights, kept, wanted, 1 << 20)
    weights[name] = weights[name] + 0.1 * torch.randn_like(weights[name])
    gap_without = (found - dense(x, case, weights, kept)).abs().max()
    # A shift of all keys alike moves every score of a query alike: softmax, and so the layer, cannot see it.
    assert gap_without < 1e-12 if name.endswith("k_proj.bias") else gap_without > 1e-6


def test_the_comparison_sees_a_forgotten_mask_and_a_forgotten_causality() -> None:
    case, holes, everything = replace(BASE, seq_len=101), MASKS["holes"], torch.ones(101, dtype=torch.bool)
    x, weights, wanted = torch.randn(101, 24), lively_weights(case), torch.arange(101)
    found = blocked(x.clone(), case, weights, holes, wanted, LEAST_BYTES)
    assert (found - dense(x, case, weights, everything))[holes].abs().max() > 1e-6
    assert (found - dense(x, replace(case, causal=False), weights, holes)).abs().max() > 1e-6


def test_tiles_shrink_to_the_bound_and_no_further() -> None:
    assert block_of(1, 1 << 30) == (512, 256)
    queries, keys = block_of(16, 1 << 20)
    assert 8 * 16 * queries * keys <= 1 << 20
    with pytest.raises(layer.CannotJudge, match="need 2,048 bytes at least, the bound is 2,047"):
        block_of(2, LEAST_BYTES - 1)
