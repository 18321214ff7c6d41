"""Each kernel that tells a log-sum-exp tells the natural one, at any length, and the canary stops one that does not."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION, AttendLse, Kernel
from frontier.layers.canary import canary, why_not
from frontier.layers.costs import WITHOUT_LSE
from frontier.machine import Machine
from frontier.recipe import REFERENCE, WORDS, parse_recipe

MakeCase = Callable[..., Case]


def test_the_kernels_without_a_log_sum_exp_are_the_listed_ones() -> None:
    assert {word for word in WORDS["attention"] if ATTENTION[word].attend_lse is None} == set(WITHOUT_LSE)


@pytest.mark.parametrize("kernel", ["dense", "flash"])
@pytest.mark.parametrize(("queries", "keys", "causal"), [
    (1, 1, True), (7, 7, True), (33, 33, True), (33, 33, False), (7, 33, False), (33, 7, False), (1, 130, False),
])  # fmt: skip
def test_context_and_log_sum_exp_equal_float64(kernel: str, queries: int, keys: int, causal: bool) -> None:
    torch.manual_seed(keys)
    packed = torch.randn(2, max(queries, keys), 3, 3, 8)
    q, k, v = packed[:, :queries, 0], packed[:, :keys, 1], packed[:, :keys, 2]
    attend = ATTENTION[kernel].attend_lse
    assert attend is not None
    context, lse = attend(q, k, v, causal)
    scores = torch.einsum("bqhk,bshk->bhqs", q.double(), k.double()) / math.sqrt(8)
    if causal:
        scores.masked_fill_(torch.ones(queries, keys, dtype=torch.bool).triu(1), -torch.inf)
    want = torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), v.double())
    assert lse.shape == (2, 3, queries) and lse.dtype == torch.float32
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=2e-6)
    assert torch.allclose(context.double(), want, atol=2e-6)
    assert torch.allclose(context, ATTENTION[kernel].attend(q, k, v, causal), atol=1e-6)


def flash_lse() -> AttendLse:
    attend = ATTENTION["flash"].attend_lse
    assert attend is not None
    return attend


def changed(change: Callable[[Tensor], Tensor], only_full: bool = False) -> AttendLse:
    right = flash_lse()

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        context, lse = right(q, k, v, causal)
        return context, lse if causal and only_full else change(lse.clone())

    return attend


def last_is_wrong(lse: Tensor) -> Tensor:
    lse[..., -1] += 0.01
    return lse


def one_nan(lse: Tensor) -> Tensor:
    lse[0, 0, 0] = torch.nan
    return lse


def verdict(kernel: AttendLse, case: Case, machine: Machine, recipe: str = "fp32/packed/flash") -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTION, "flash", Kernel(ATTENTION["flash"].attend, lambda *_: None, kernel))
        return canary(case, parse_recipe(recipe, REFERENCE), machine, chunk=128)


@pytest.mark.parametrize("only_full", [False, True], ids=["always", "only where all is visible"])
@pytest.mark.parametrize(
    "change",
    [lambda lse: lse / math.log(2), lambda lse: lse * 0, lambda lse: lse + 0.01, lambda lse: lse.roll(1, -1),
     last_is_wrong, one_nan],
    ids=["base 2", "zeros", "shifted", "misplaced", "last", "nan"],
)  # fmt: skip
def test_a_wrong_log_sum_exp_is_stopped(
    make_case: MakeCase, laptop: Machine, change: Callable[[Tensor], Tensor], only_full: bool
) -> None:
    reason = verdict(changed(change, only_full), make_case(seq_len=1000), laptop)
    assert reason is not None and reason.startswith("wrong log-sum-exp at S = 128: off by ")
    assert reason.endswith("limit 0.0001 in base e")


@pytest.mark.parametrize("causal", [True, False])
def test_the_same_kernel_without_its_fault_is_let_through(make_case: MakeCase, laptop: Machine, causal: bool) -> None:
    assert verdict(flash_lse(), make_case(seq_len=1000, causal=causal), laptop) is None


def test_a_wrong_context_is_stopped_where_only_chunks_see_it(make_case: MakeCase, laptop: Machine) -> None:
    right = flash_lse()
    reason = verdict(lambda q, k, v, causal: (right(q, k, v, True)[0], right(q, k, v, causal)[1]), make_case(), laptop)
    assert reason is not None and reason.startswith("wrong numbers at S = ")


def test_a_kernel_that_is_wrong_only_beyond_a_chunk_of_keys_is_stopped(make_case: MakeCase, laptop: Machine) -> None:
    """Where keys wait on the card a chunk meets all before it in one call."""
    right = flash_lse()

    def forgets_late_keys(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return right(q, k[:, :500], v[:, :500], causal)

    assert verdict(forgets_late_keys, make_case(seq_len=400), laptop) is None
    assert "wrong numbers at S = 128" in (verdict(forgets_late_keys, make_case(seq_len=1000), laptop) or "")


@pytest.mark.parametrize("recipe", ["fp32/packed/dense", "fp32/packed/flash", "fp32/separate/flash"])
def test_right_kernels_are_let_through_for_chunks(make_case: MakeCase, laptop: Machine, recipe: str) -> None:
    assert why_not(make_case(seq_len=300), parse_recipe(recipe, REFERENCE), laptop, chunk=64) is None


@pytest.mark.parametrize("recipe", ["fp16/packed/short", "fp16/packed/scores", "fp32/packed/flash/graph"])
def test_a_recipe_that_cannot_cut_rows_refuses_by_name(make_case: MakeCase, laptop: Machine, recipe: str) -> None:
    parsed = parse_recipe(recipe, REFERENCE)
    reason = why_not(make_case(), parsed, laptop, chunk=64)
    assert reason is not None and ("log-sum-exp" in reason or "chunks are launched eagerly" in reason)
