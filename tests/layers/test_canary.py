"""The canary lets right kernels through and stops wrong ones, however long the sequence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import frontier.layers.canary as canary_module
from frontier.case import Case
from frontier.layers.attention import ATTENTION, Kernel, dense
from frontier.layers.canary import TOLERANCE, canary, checked_rows, why_not
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

MakeCase = Callable[..., Case]
LONG = 70_000  # past 2^16, where 2^32 // S is a row of the sequence
BLOCK = 64  # keys, as a tile that gets lost


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("seq_len", [1, 2, 127, 300, 2048])
@pytest.mark.parametrize("recipe", ["fp32/packed/dense", "fp32/packed/flash", "fp32/separate/flash"])
def test_right_kernels_are_let_through_on_the_cpu(
    make_case: MakeCase, laptop: Machine, recipe: str, seq_len: int, causal: bool
) -> None:
    assert why_not(make_case(seq_len=seq_len, causal=causal), parse_recipe(recipe, REFERENCE), laptop) is None


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("cudnn", "it needs a card"),
        ("efficient", "memory-efficient attention needs a card"),
        ("fa4", "it needs a card"),
        ("fp16/flash", "half precision attention is slow and untested on the CPU"),
    ],
)
def test_a_kernel_that_cannot_serve_here_says_why(
    make_case: MakeCase, laptop: Machine, recipe: str, reason: str
) -> None:
    assert why_not(make_case(), parse_recipe(recipe, REFERENCE), laptop) == reason


def checked_only(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float = 1.0, shift: int = 0, lost: range = range(0)
) -> Tensor:
    """A kernel that computes the rows the canary looks at, so that long sequences cost little on a CPU."""
    context = torch.zeros_like(q)
    k, v = k[0].float(), v[0].float()
    for row in checked_rows(q.shape[1]):
        keys = max(1, row + 1 + shift) if causal else len(k)
        scores = torch.einsum("hk,shk->hs", q[0, row].float(), k[:keys]) * scale * q.shape[-1] ** -0.5
        scores[:, lost.start : lost.stop] = -torch.inf
        context[0, row] = torch.einsum("hs,shk->hk", scores.softmax(-1), v[:keys]).to(q.dtype)
    return context


def right(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return checked_only(q, k, v, causal)


def wrong_scale(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return checked_only(q, k, v, causal, scale=1.1)


def sees_one_key_less(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return checked_only(q, k, v, True, shift=-1)


def sees_one_key_more(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return checked_only(q, k, v, True, shift=1)


def loses_an_early_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return checked_only(q, k, v, causal, lost=range(256, 256 + BLOCK))


def loses_a_late_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Under causal only the last rows ever see it."""
    end = len(k[0]) // BLOCK * BLOCK - BLOCK
    return checked_only(q, k, v, causal, lost=range(end - BLOCK, end))


def zeros(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.zeros_like(q)


def one_nan(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    context = right(q, k, v, causal)
    context[0, 63, 0, 0] = torch.nan
    return context


def past_the_32_bit_offset(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """pytorch#162588: right up to row 2^32 / S, wrong after it."""
    context = right(q, k, v, causal)
    context[:, (1 << 32) // q.shape[1] + 1 :] = v[:, :1]
    return context


WRONG = [wrong_scale, sees_one_key_less, sees_one_key_more, loses_an_early_block, loses_a_late_block, zeros, one_nan]


def verdict(kernel: Callable[..., Tensor], case: Case, recipe: str, laptop: Machine) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTION, "flash", Kernel(kernel, lambda *_: None))
        patch.setattr(canary_module, "CPU_MOST_POSITIONS", 1 << 30)  # these kernels are cheap at any length
        return canary(case, parse_recipe(f"{recipe}/flash", REFERENCE), laptop)


PLACES = [("fp32", 2048), ("tf32", 2048), ("fp16", 2048), ("bf16", 2048), ("fp16", LONG)]


@pytest.mark.parametrize(("recipe", "seq_len"), PLACES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_stopped_with_its_error(
    make_case: MakeCase, laptop: Machine, wrong: Callable[..., Tensor], recipe: str, seq_len: int
) -> None:
    reason = verdict(wrong, make_case(seq_len=seq_len), recipe, laptop)
    assert reason is not None and reason.startswith(f"wrong numbers at S = {seq_len}: relative error ")
    assert reason.endswith(f"limit {TOLERANCE[recipe]:.2g}")


@pytest.mark.parametrize(("recipe", "seq_len"), PLACES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_same_kernel_without_its_fault_is_let_through(
    make_case: MakeCase, laptop: Machine, recipe: str, causal: bool, seq_len: int
) -> None:
    assert verdict(right, make_case(seq_len=seq_len, causal=causal), recipe, laptop) is None


def test_a_kernel_that_goes_wrong_past_the_32_bit_offset_is_stopped(make_case: MakeCase, laptop: Machine) -> None:
    assert verdict(past_the_32_bit_offset, make_case(seq_len=LONG), "fp16", laptop) is not None


@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_a_block_lost_at_the_end_of_100_000_keys_is_not_taken_for_rounding(
    make_case: MakeCase, laptop: Machine, recipe: str
) -> None:
    assert verdict(loses_a_late_block, make_case(seq_len=100_000, d_model=16, heads=2), recipe, laptop) is not None


@pytest.mark.parametrize("power", [2, 8])
def test_a_kernel_that_raises_is_stopped_with_its_words(make_case: MakeCase, laptop: Machine, power: int) -> None:
    def raises(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        raise RuntimeError("No available kernel.\n" * power)

    reason = verdict(raises, make_case(), "fp32", laptop)
    assert reason is not None and reason.startswith("it failed: No available kernel.") and len(reason) < 320


def test_an_interrupt_is_no_refusal(make_case: MakeCase, laptop: Machine) -> None:
    def interrupted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdict(interrupted, make_case(), "fp32", laptop)


def test_the_canary_leaves_the_callers_random_state_alone(make_case: MakeCase, laptop: Machine) -> None:
    before = torch.get_rng_state()
    assert verdict(dense, make_case(), "fp32", laptop) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 64, 127, 65_535, 65_536, 65_537, 100_000, 1 << 20])
def test_checked_rows_lie_in_the_sequence_at_its_ends_and_around_the_32_bit_edge(seq_len: int) -> None:
    rows = checked_rows(seq_len)
    assert rows == sorted(set(rows)) and rows[0] == 0 and rows[-1] == seq_len - 1 and len(rows) < 30
    edge = (1 << 32) // seq_len
    assert {row for row in (edge - 1, edge, edge + 1) if row < seq_len} <= set(rows)
    assert (edge in rows) == (seq_len > 1 << 16)
