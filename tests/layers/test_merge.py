"""Merging keeps what two sets of keys say, however far apart they lie, in any order, and whoever is empty."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from frontier.layers.attention import ATTENTION
from frontier.layers.merge import merge

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], None]
GAPS = [0.0, 1e-3, 1.0, 50.0, 88.0, 89.0, 104.0, 1e4]
A, B = 2.0, -3.0


def merged(a: float, lse_a: float, b: float, lse_b: float, do: Merge = merge) -> tuple[float, float]:
    out_CHK, lse_HC = torch.full((1, 1, 4), a), torch.full((1, 1), lse_a)
    do(out_CHK, lse_HC, torch.full((1, 1, 4), b), torch.full((1, 1), lse_b))
    return float(out_CHK[0, 0, 0]), float(lse_HC[0, 0])


def exact(a: float, lse_a: float, b: float, lse_b: float) -> tuple[float, float]:
    high, low = max(lse_a, lse_b), min(lse_a, lse_b)
    lse = high + math.log1p(math.exp(low - high))
    return a * math.exp(lse_a - lse) + b * math.exp(lse_b - lse), lse


def naive(out_CHK: Tensor, lse_HC: Tensor, block_CHK: Tensor, block_lse_HC: Tensor) -> None:
    """What others wrote: `log1p(exp(...))` of a gap that may be large (EasyContext#14)."""
    lse = lse_HC + torch.log1p(torch.exp(block_lse_HC - lse_HC))
    shares = [(part - lse).exp().t()[..., None] for part in (lse_HC, block_lse_HC)]
    out_CHK.copy_(shares[0] * out_CHK + shares[1] * block_CHK)
    lse_HC.copy_(lse)


@pytest.mark.parametrize("level", [0.0, -200.0, 9e3])
@pytest.mark.parametrize("gap", [sign * gap for gap in GAPS for sign in (1, -1)])
def test_any_gap_in_either_order_gives_the_exact_join(gap: float, level: float) -> None:
    for a, b in ((A, B), (B, A)):
        want, want_lse = exact(a, level, b, level + gap)
        out, lse = merged(a, level, b, level + gap)
        assert out == pytest.approx(want, rel=2e-3 if level else 1e-6, abs=1e-12)  # 9,000 has 1e-3 of room in float32
        assert lse == pytest.approx(want_lse, rel=1e-6, abs=1e-6)


def test_the_usual_formula_turns_a_row_to_zeros_and_would_be_seen() -> None:
    assert merged(A, 0.0, B, 50.0, naive)[0] == pytest.approx(B)
    for gap in (89.0, 1e4):
        assert merged(A, 0.0, B, gap, naive)[0] == 0.0 != merged(A, 0.0, B, gap)[0]


@pytest.mark.parametrize("says_empty", [-math.inf, math.inf])
def test_an_empty_side_has_no_weight_at_all(says_empty: float) -> None:
    assert merged(A, 1.5, 7e30, says_empty) == (A, 1.5)
    assert merged(7e30, says_empty, B, -1.5) == (B, -1.5)
    assert merged(0.0, says_empty, 0.0, says_empty) == (0.0, -math.inf)


@pytest.mark.parametrize("lse", [0.0, 12.5, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("junk", [0.0, 1e30, math.nan])
def test_an_empty_block_that_looks_like_any_other_is_named_by_its_count(lse: float, junk: float) -> None:
    out_CHK, lse_HC = torch.tensor([[[A]], [[A]]]), torch.tensor([[1.5, 1.5]])
    block_CHK, block_lse_HC = torch.tensor([[[B]], [[junk]]]), torch.tensor([[1.5, lse]])
    merge(out_CHK, lse_HC, block_CHK, block_lse_HC, empty_HC=torch.tensor([[False, True]]))
    assert out_CHK.flatten().tolist() == pytest.approx([(A + B) / 2, A])
    assert lse_HC.flatten().tolist() == pytest.approx([1.5 + math.log(2), 1.5])


def test_an_overflow_is_not_taken_for_an_empty_side() -> None:
    for lse in (math.inf, math.nan, 3.0):
        assert math.isnan(merged(A, 1.5, math.nan, lse)[0])
        assert math.isnan(merged(math.nan, lse, B, 1.5)[0])


def attention(chunks: int, half_running: bool = False, dtype: torch.dtype = torch.float16) -> float:
    """Error of full attention over 512 keys in so many blocks, each answered in `dtype`, against float64."""
    torch.manual_seed(chunks)
    q, k, v = (torch.randn(1, 512, 2, 16, dtype=torch.float64) for _ in range(3))
    scores = torch.einsum("bqhk,bshk->bhqs", q, k) / 4
    want_CHK = torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), v)[0]
    out_CHK, lse_HC = torch.zeros(512, 2, 16), torch.full((2, 512), -math.inf)
    attend = ATTENTION["dense"].attend_lse
    assert attend is not None
    for k_part, v_part in zip(k.chunk(chunks, 1), v.chunk(chunks, 1), strict=True):
        context_BCHK, lse_BHC = attend(q.float(), k_part.float(), v_part.float(), False)
        merge(out_CHK, lse_HC, context_BCHK[0].to(dtype), lse_BHC[0])
        if half_running:
            out_CHK.copy_(out_CHK.to(dtype))
    assert torch.allclose(lse_HC.double(), scores.logsumexp(-1)[0], atol=1e-5)
    return float((out_CHK - want_CHK).norm() / want_CHK.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_does_not_grow_with_the_number_of_blocks(dtype: torch.dtype) -> None:
    errors = {chunks: attention(chunks, dtype=dtype) for chunks in (1, 2, 8, 64)}
    rounding = math.sqrt(64) * 2**-24  # of the float32 sums, once a merge
    assert all(error <= 1.05 * errors[1] + rounding for error in errors.values()), errors


def test_running_sums_in_half_precision_would_be_seen_to_grow() -> None:
    assert attention(64, half_running=True) > 2 * attention(1)
