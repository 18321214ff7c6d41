"""The stack equals an independent one, for every shape, recipe and tile; half precision keeps its budget."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain import plain
from stacks import rows_of, run_stack
from torch import Tensor

import frontier.layers.block as block_module
from frontier.case import Case
from frontier.layers.attention import ATTENTION, Kernel
from frontier.layers.block import matmul_precision
from frontier.layers.ffn import FFN
from frontier.layers.join import JOIN
from frontier.layers.launch import LAUNCH
from frontier.recipe import WORDS, Recipe
from frontier.spans import cut

MakeCase = Callable[..., Case]
RECIPES = ["fp32/separate/dense", "fp32/packed/dense", "fp32/separate/flash", "fp32/packed/flash"]
# Each length, batch, depth and head width at least once, not all of their products.
SHAPES = [
    {"seq_len": 1, "batch_size": 1, "layers": 1},
    {"seq_len": 1, "batch_size": 3, "layers": 3},
    {"seq_len": 2, "batch_size": 2, "layers": 2},
    {"seq_len": 127, "batch_size": 1, "layers": 2},
    {"seq_len": 127, "batch_size": 3, "layers": 3},
    {"seq_len": 300, "batch_size": 2, "layers": 1},
    {"d_model": 64, "heads": 2, "ffn_dim": 16},
    {"d_model": 128, "heads": 2, "ffn_dim": 64},
    {"d_model": 128, "heads": 1, "layers": 1},
    {"d_model": 256, "heads": 1, "layers": 1},
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_stack_equals_an_independent_one(
    make_case: MakeCase, recipe: str, sizes: dict[str, Any], causal: bool
) -> None:
    case = make_case(**sizes, causal=causal)
    x_BSD = rows_of(case)
    assert_near(run_stack(case, recipe, x_BSD), plain(case)(x_BSD))


def assert_near(got: Tensor, want: Tensor, limit: float = 1e-5) -> None:
    worst = float((got - want).abs().max())
    assert worst <= limit, f"worst difference {worst:.2g}"


def wrong_scale(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return ATTENTION["flash"].attend(q * 1.01, k, v, causal)


def shifted_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (torch.cat([t[:, 1:], t[:, :1]], 1) for t in (k, v))
    return ATTENTION["flash"].attend(q, k, v, causal)


def heads_swapped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return ATTENTION["flash"].attend(q, k, v, causal).flip(2)


def not_causal(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return ATTENTION["flash"].attend(q, k, v, False)


@pytest.mark.parametrize("wrong", [wrong_scale, shifted_mask, heads_swapped, not_causal])
def test_a_wrong_kernel_would_be_seen(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor]
) -> None:
    case = make_case(seq_len=127)
    x_BSD = rows_of(case)
    monkeypatch.setitem(ATTENTION, "dense", Kernel(wrong, lambda *_: None))
    with pytest.raises(AssertionError):
        assert_near(run_stack(case, "dense", x_BSD), plain(case)(x_BSD))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tile_tokens", [1, 7, 74])
def test_tiles_of_any_length_change_nothing(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch, recipe: str, tile_tokens: int
) -> None:
    case = make_case()
    whole_BSD = run_stack(case, recipe, rows_of(case))
    monkeypatch.setattr(block_module, "TILE_TOKENS", tile_tokens)
    assert_near(run_stack(case, recipe, rows_of(case)), whole_BSD, 2e-6)


def test_a_tile_left_out_would_be_seen(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    whole_BSD = run_stack(case, "packed/flash", rows_of(case))
    monkeypatch.setattr(block_module, "cut", lambda total, size: list(cut(total, 7))[:-1])
    with pytest.raises(AssertionError):
        assert_near(torch.nan_to_num(run_stack(case, "packed/flash", rows_of(case))), whole_BSD, 2e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_input_is_left_as_it_was(make_case: MakeCase, recipe: str) -> None:
    case = make_case()
    x_BSD = rows_of(case)
    kept_BSD = x_BSD.clone()
    out_BSD = run_stack(case, recipe, x_BSD)
    assert torch.equal(x_BSD, kept_BSD) and not torch.equal(out_BSD, kept_BSD)


def test_two_calls_outputs_held_at_once_stay_different(make_case: MakeCase) -> None:
    case = make_case()
    first_BSD = run_stack(case, "packed/flash", rows_of(case))
    kept_BSD = first_BSD.clone()
    second_BSD = run_stack(case, "packed/flash", rows_of(case, scale=2))
    assert torch.equal(first_BSD, kept_BSD) and not torch.equal(first_BSD, second_BSD)


def test_rows_do_not_see_one_another(make_case: MakeCase) -> None:
    case = make_case(batch_size=3)
    x_BSD = rows_of(case)
    whole_BSD = run_stack(case, "packed/flash", x_BSD)
    changed_BSD = x_BSD.clone()
    changed_BSD[1] = torch.nan
    alone_BSD = run_stack(case, "packed/flash", changed_BSD)
    assert_near(alone_BSD[[0, 2]], whole_BSD[[0, 2]], 1e-6)
    assert alone_BSD[1].isnan().any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("recipe", ["fp16/packed/dense", "bf16/packed/dense", "fp16/separate/dense"])
def test_half_precision_keeps_its_error_budget(make_case: MakeCase, recipe: str, scale: float, causal: bool) -> None:
    """error(fast) <= 2 x error(naive in the same precision) + rounding, both against float64."""
    case = make_case(seq_len=127, d_model=64, heads=4, causal=causal)
    x_BSD = rows_of(case, scale)
    exact_BSD = plain(case).double()(x_BSD.double())
    dtype = torch.float16 if recipe.startswith("fp16") else torch.bfloat16
    naive = float((plain(case).to(dtype)(x_BSD.to(dtype)).double() - exact_BSD).abs().max())
    error_BSD = (run_stack(case, recipe, x_BSD).double() - exact_BSD).abs()
    assert 0 < float(error_BSD.max()) <= 2 * naive + torch.finfo(dtype).eps
    if dtype == torch.float16 and scale >= 1:  # the official rule besides; tiny inputs and bf16 may break it
        assert bool(((error_BSD < case.atol) | (error_BSD < case.rtol * exact_BSD.abs())).all())


def test_an_attention_that_is_wrong_by_a_tenth_breaks_the_budget(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ATTENTION["dense"].attend
    monkeypatch.setitem(ATTENTION, "dense", Kernel(lambda *given: right(*given) * 1.1, lambda *_: None))
    with pytest.raises(AssertionError):
        test_half_precision_keeps_its_error_budget(make_case, "fp16/packed/dense", 1.0, True)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_precision_switches_are_set_for_the_run_and_put_back(precision: Any) -> None:
    switches = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(switches, name) for name in names]
    with pytest.raises(ZeroDivisionError), matmul_precision(Recipe(precision=precision)):
        assert [getattr(switches, name) for name in names] == [precision == "tf32", False, False]
        raise ZeroDivisionError
    assert [getattr(switches, name) for name in names] == before


def switched() -> tuple[Any, ...]:
    """Every switch of TF32, old and new; the old ones refuse to be read once the new ones were used."""
    matmul, told = torch.backends.cuda.matmul, list[Any]()
    for ask in (lambda: matmul.allow_tf32, torch.get_float32_matmul_precision):
        try:
            told.append(ask())
        except RuntimeError:
            told.append("refuses")
    return matmul.fp32_precision, torch.backends.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision, *told


@pytest.fixture
def usual_switches() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize(
    "switch",
    [
        lambda: None,
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ],
    ids=["none", "old", "high", "medium", "new", "new, off", "new, for all"],
)
def test_whichever_switches_a_user_has_set_are_set_for_the_run_and_put_back(
    usual_switches: None, switch: Callable[[], None], precision: Any
) -> None:
    switch()
    before = switched()
    with matmul_precision(Recipe(precision=precision)):
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if precision == "tf32" else "ieee")
    assert switched() == before


def test_every_recipe_word_has_a_row_in_its_table() -> None:
    tables: dict[str, dict[str, Any]] = {"attention": ATTENTION, "join": JOIN, "ffn": FFN, "launch": LAUNCH}
    assert {part: tuple(table) for part, table in tables.items()} == {part: WORDS[part] for part in tables}
