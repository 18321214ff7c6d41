"""Invalid tokens are left out exactly: as if masked by -inf, never NaN; an all-true mask costs nothing."""

from collections.abc import Callable

import pytest
import torch
from plain import plain
from stacks import rows_of, run_stack
from torch import Tensor

from frontier.case import Case
from frontier.layers.attention import ATTENTION, Kernel

MakeCase = Callable[..., Case]
S = 37
RECIPES = ["fp32/separate/dense", "fp32/packed/flash"]


def prefix() -> Tensor:
    return torch.arange(S) < 20


def left_padding() -> Tensor:
    return torch.arange(S) >= 9


def holes() -> Tensor:
    return (torch.arange(S) % 3 != 1) & (torch.arange(S) != S - 1)


def one_at_the_start() -> Tensor:
    return torch.arange(S) == 0


def one_inside() -> Tensor:
    return torch.arange(S) == 17


def all_but_one() -> Tensor:
    return torch.arange(S) != 5


def none_valid() -> Tensor:
    return torch.zeros(S, dtype=torch.bool)


def all_valid() -> Tensor:
    return torch.ones(S, dtype=torch.bool)


SHAPES = [prefix, left_padding, holes, one_at_the_start, one_inside, all_but_one, none_valid, all_valid]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mask_equals_a_dense_baseline_with_minus_infinity(
    make_case: MakeCase, recipe: str, shape: Callable[[], Tensor], causal: bool
) -> None:
    case = make_case(batch_size=3, causal=causal)
    valid_BS = torch.stack([all_valid(), shape(), holes()])
    assert_masked(case, recipe, valid_BS, valid_BS)


def assert_masked(case: Case, recipe: str, given_BS: Tensor, meant_BS: Tensor) -> None:
    x_BSD = rows_of(case)
    kept_BSD = x_BSD.clone()
    got_BSD = run_stack(case, recipe, x_BSD, given_BS)
    assert torch.equal(x_BSD, kept_BSD), "x was changed"
    assert not got_BSD.isnan().any(), "NaN"
    assert (got_BSD[~meant_BS] == 0).all(), "an invalid token's output is not 0"
    want_BSD = plain(case)(x_BSD, meant_BS)
    assert float((got_BSD - want_BSD)[meant_BS].abs().max()) <= 1e-5


@pytest.mark.parametrize("fault", ["shifted", "ignored", "one key more", "rows swapped"])
def test_a_wrong_mask_would_be_seen(make_case: MakeCase, fault: str) -> None:
    case = make_case(batch_size=2)
    meant_BS = torch.stack([holes(), left_padding()])
    given_BS = meant_BS.clone()
    if fault == "shifted":
        given_BS = given_BS.roll(1, 1)
    if fault == "ignored":
        given_BS[:] = True
    if fault == "one key more":
        given_BS[0, 1] = True
    if fault == "rows swapped":
        given_BS = given_BS.flip(0)
    with pytest.raises(AssertionError):
        assert_masked(case, "packed/flash", given_BS, meant_BS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_lies_in_an_invalid_token_reaches_nothing(make_case: MakeCase, recipe: str, poison: float) -> None:
    case = make_case(batch_size=2, causal=False)
    valid_BS = torch.stack([holes(), none_valid()])
    x_BSD = rows_of(case)
    clean_BSD = run_stack(case, recipe, x_BSD, valid_BS)
    x_BSD[~valid_BS] = poison
    assert torch.equal(run_stack(case, recipe, x_BSD, valid_BS), clean_BSD)
    assert not torch.equal(run_stack(case, recipe, x_BSD), clean_BSD)


def calls_made(monkeypatch: pytest.MonkeyPatch, case: Case, valid_BS: Tensor | None) -> tuple[Tensor, list[torch.Size]]:
    shapes: list[torch.Size] = []
    right = ATTENTION["flash"].attend

    def counted(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        shapes.append(q.shape)
        return right(q, k, v, causal)

    with monkeypatch.context() as patch:
        patch.setitem(ATTENTION, "flash", Kernel(counted, lambda *_: None))
        return run_stack(case, "packed/flash", rows_of(case), valid_BS), shapes


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_all_true_mask_takes_the_same_path_and_gives_the_same_bits(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Contract, section 1: the benchmark script always passes one; it must cost nothing."""
    case = make_case(batch_size=batch_size)
    plain_BSD, plain_calls = calls_made(monkeypatch, case, None)
    masked_BSD, masked_calls = calls_made(monkeypatch, case, torch.ones(batch_size, S, dtype=torch.bool))
    assert torch.equal(masked_BSD, plain_BSD)
    assert masked_calls == plain_calls


def test_a_mask_with_one_invalid_token_takes_another_path(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(batch_size=1)
    _, plain_calls = calls_made(monkeypatch, case, None)
    _, masked_calls = calls_made(monkeypatch, case, all_but_one()[None])
    assert masked_calls != plain_calls


def test_a_mask_of_the_wrong_number_of_rows_is_our_own_mistake(make_case: MakeCase) -> None:
    case = make_case(batch_size=2)
    with pytest.raises(ValueError, match="zip"):
        run_stack(case, "dense", rows_of(case), holes()[None])
