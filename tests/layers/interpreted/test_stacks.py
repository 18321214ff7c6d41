"""Recipes with Triton parts, as whole stacks under Triton's interpreter, against an independent stack in float64."""

import pytest
import torch
from plain import plain
from stacks import rows_of, run_stack, small

from frontier.layers.canary import why_not
from frontier.layers.program import make_program, refusal
from frontier.layers.tail import TailStack
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

# (recipe, the same with parts of PyTorch)
RECIPES = [
    ("fp32/packed/dense/triton-join", "fp32/packed/dense"),
    ("fp32/separate/scores", "fp32/separate/dense"),
    ("tf32/packed/short", "tf32/packed/dense"),
    ("fp16/packed/short/triton-join/triton-ffn", "fp16/packed/dense"),
    ("fp16/packed/scores/triton-join/held-ffn", "fp16/packed/dense/held-ffn"),
    ("fp16/separate/short/triton-ffn/held-projections", "fp16/separate/dense/held-projections"),
    ("fp16/packed/dense/tail", "fp16/packed/dense"),
    ("fp16/packed/short/tail", "fp16/packed/dense"),
    ("fp16/packed/short/held-small/tail", "fp16/packed/dense"),
    ("fp16/packed/short/held-ffn/tail", "fp16/packed/dense/held-ffn"),
]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("recipe", "torchs"), RECIPES, ids=[recipe for recipe, _ in RECIPES])
def test_a_recipe_of_triton_parts_is_as_near_to_float64_as_pytorchs(
    recipe: str, torchs: str, causal: bool, masked: bool
) -> None:
    case = small(causal=causal, ffn_dim=64 if "tail" in recipe else 48)  # that kernel takes powers of two
    x_BSD = rows_of(case)
    valid_BS = torch.arange(37).expand(2, 37) % 5 != 1 if masked else None
    exact_BSD = plain(case).double()(x_BSD.double(), valid_BS)
    given = parse_recipe(recipe, REFERENCE)
    assert refusal(case, given, Machine.detect("cpu")) is None
    got_BSD = torch.full_like(x_BSD, torch.nan)
    make_program(seeded_state(case), case, given, torch.device("cpu"))(x_BSD, got_BSD, valid_BS)
    theirs_BSD = run_stack(case, torchs, x_BSD, valid_BS)
    ours, theirs = (float((y.double() - exact_BSD).abs().max()) for y in (got_BSD, theirs_BSD))
    assert 0 < ours <= 2 * theirs + 1e-6, (ours, theirs)


@pytest.mark.parametrize(
    "recipe", ["tf32/packed/short", "fp16/packed/short", "fp32/packed/scores", "fp16/packed/scores"]
)
def test_the_canary_lets_the_kernels_through(recipe: str) -> None:
    assert why_not(small(seq_len=300), parse_recipe(recipe, REFERENCE), Machine.detect("cpu")) is None


def test_bf16_is_refused_for_the_interpreters_sake() -> None:
    reason = why_not(small(), parse_recipe("bf16/packed/short", REFERENCE), Machine.detect("cpu"))
    assert reason == "Triton's interpreter cannot multiply bf16"


@pytest.mark.parametrize(
    ("words", "sizes", "reason"),
    [
        ("fp32/packed/short/tail", {}, "precision fp32, the kernel between attentions"),
        ("fp16/separate/short/tail", {}, "projection separate, the kernel between attentions"),
        ("fp16/packed/short/held-all/tail", {}, "held-all: the kernel between attentions holds the feed-forward"),
        ("fp16/packed/short/compile/tail", {}, "compile cannot trace the Triton kernel between attentions"),
        ("fp16/packed/short/tail", {"ffn_dim": 48}, "ffn_dim 48, the kernel between attentions holds powers of two"),
        ("fp16/packed/short/tail", {"d_model": 256}, "d_model 256, the kernel between attentions"),
    ],
)
def test_what_the_kernel_between_attentions_cannot_serve_is_refused_by_name(
    words: str, sizes: dict[str, int], reason: str
) -> None:
    told = refusal(small(**{"ffn_dim": 64, **sizes}), parse_recipe(words, REFERENCE), Machine.detect("cpu"))
    assert told is not None and told.startswith(reason)


def test_a_layer_mistaken_for_its_neighbour_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(ffn_dim=64)
    x_BSD = rows_of(case)
    launch = TailStack._launch
    monkeypatch.setattr(TailStack, "_launch", lambda self, *given: launch(self, *given[:3], 0, given[4]))
    program = make_program(
        seeded_state(case), case, parse_recipe("fp16/packed/dense/tail", REFERENCE), torch.device("cpu")
    )
    got_BSD = torch.empty_like(x_BSD)
    program(x_BSD, got_BSD)
    assert float((got_BSD.double() - plain(case).double()(x_BSD.double(), None)).abs().max()) > 0.05
