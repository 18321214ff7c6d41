"""Each replaceable part serves where it says so and refuses with its reason where it cannot."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plain import plain
from stacks import rows_of, run_stack, small

import frontier.layers.refusals as refusals_module
from frontier.case import Case
from frontier.layers.program import make_program, refusal
from frontier.layers.weights import pack, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

MakeCase = Callable[..., Case]
BASE = parse_recipe("fp16/packed/cudnn", REFERENCE)
LONG = "a row of 20000 positions keeps a device busy by itself, a launch gains up to 16384"
FFN = "the feed-forward GEMMs are float32 ({}), the Triton one needs fp16 or bf16"
FIRST = "{}: only the one kernel for the whole stack holds the output projection alone"
HELD = "held-ffn keeps GEMMs in float32 beside fp16 or bf16, the precision is fp32"
OURS = "torch.compile makes its own kernels of PyTorch's parts, `{}` is none"
SEPARATE = "torch.compile writes no GEMM into a part of a buffer, needs packed projections"
WIDE = "d_model 32768, the Triton join holds a token of up to 16384"
CARD = "a Triton kernel needs a card (or TRITON_INTERPRET=1, which is very slow)"


def card(laptop: Machine, capability: tuple[int, int]) -> Machine:
    return replace(laptop, device="cuda:0", name="a card", capability=capability)


@pytest.mark.parametrize(
    ("words", "sizes", "capability", "reason"),
    [
        ("fp16/short", {}, None, CARD),
        ("scores", {}, None, CARD),
        ("triton-join", {}, None, CARD),
        ("dense/triton-ffn", {}, None, CARD),
        ("dense/graph", {}, None, "a CUDA graph needs a card"),
        ("dense/compile-max-autotune", {}, None, "compile-max-autotune needs a card"),
        ("short", {}, (7, 0), "compute capability 7.0, needs 7.5"),
        ("triton-join", {}, (7, 0), "compute capability 7.0, needs 8.0"),  # cudnn is asked first
        ("fp32/short", {}, (9, 0), "precision fp32 would multiply without matrix units, needs fp16, bf16 or tf32"),
        ("short", {"d_model": 1024, "heads": 2}, (9, 0), "head width 512, needs 256 or less"),
        ("scores", {"seq_len": 20_000}, (9, 0), "seq_len 20000, one program holds a query's scores for 16384 keys"),
        ("triton-join", {"d_model": 32_768, "heads": 256}, (9, 0), WIDE),
        ("fp32/dense/triton-ffn", {}, (9, 0), FFN.format("precision fp32")),
        ("triton-ffn/held-all", {}, (9, 0), FFN.format("held-all")),
        ("triton-ffn", {"ffn_dim": 50}, (9, 0), "d_model 32 and ffn_dim 50, the Triton GEMM needs multiples of 8"),
        ("fp32/dense/held-ffn", {}, (9, 0), HELD),
        ("tf32/dense", {}, (7, 5), "compute capability 7.5, needs 8.0"),
        ("bf16/dense", {}, (7, 5), "compute capability 7.5, needs 8.0"),
        ("tf32x3/dense", {}, (9, 0), "only the one kernel for the whole stack multiplies in tf32x3"),
        ("dense/held-output-small", {}, (9, 0), FIRST.format("held-output-small")),
        ("graph", {"seq_len": 20_000}, (9, 0), LONG),
        ("compile", {"seq_len": 20_000}, (9, 0), LONG),
        ("short/compile", {}, (9, 0), OURS.format("short")),
        ("compile/triton-join", {}, (9, 0), OURS.format("triton-join")),
        ("compile/separate", {}, (9, 0), SEPARATE),
    ],
)  # fmt: skip
def test_a_part_that_cannot_serve_says_why(
    make_case: MakeCase, laptop: Machine, monkeypatch: pytest.MonkeyPatch,
    words: str, sizes: dict[str, Any], capability: tuple[int, int] | None, reason: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    machine = laptop if capability is None else card(laptop, capability)
    given = parse_recipe(words, BASE if capability else parse_recipe("fp16/packed/dense", REFERENCE))
    assert refusal(make_case(**sizes), given, machine) == reason


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize(
    "words",
    ["short", "scores", "dense/triton-join/triton-ffn", "efficient/graph", "efficient/compile", "dense/held-ffn"],
)
def test_every_card_from_a_t4_on_is_served(
    make_case: MakeCase, laptop: Machine, words: str, capability: tuple[int, int]
) -> None:
    for heads in (1, 2, 4, 16):
        case = make_case(d_model=128, heads=heads)
        assert refusal(case, parse_recipe(words, BASE), card(laptop, capability)) is None


@pytest.mark.parametrize("words", ["short", "scores", "triton-join", "triton-ffn", "efficient/compile"])
def test_without_triton_its_kernels_refuse(
    make_case: MakeCase, laptop: Machine, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(refusals_module.importlib.util, "find_spec", lambda name: None)
    assert "the package triton" in (refusal(make_case(), parse_recipe(words, BASE), card(laptop, (9, 0))) or "")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_more_gemms_are_held_the_smaller_the_error(make_case: MakeCase, causal: bool) -> None:
    case = make_case(seq_len=127, d_model=64, causal=causal)
    x_BSD = rows_of(case)
    exact_BSD = plain(case).double()(x_BSD.double())

    def error(words: str) -> float:
        return float((run_stack(case, f"bf16/packed/dense/{words}", x_BSD).double() - exact_BSD).pow(2).mean().sqrt())

    none, projections, ffn, both = (error(f"held-{gemms}") for gemms in ("none", "projections", "ffn", "all"))
    assert both < projections < none and both < ffn < none


def test_what_is_held_is_float32_and_nothing_else_is(make_case: MakeCase) -> None:
    case = make_case()
    for words, projections, ffn in (
        ("held-none", torch.float16, torch.float16), ("held-projections", torch.float32, torch.float16),
        ("held-ffn", torch.float16, torch.float32), ("held-all", torch.float32, torch.float32),
    ):  # fmt: skip
        stack = pack(seeded_state(case), case, parse_recipe(words, BASE), torch.device("cpu"))
        for layer in stack.layers:
            assert {t.dtype for part in (*layer.projections, layer.out) for t in part} == {projections}
            assert {t.dtype for part in (layer.ffn_in, layer.ffn_out) for t in part} == {ffn}


@pytest.mark.parametrize("recipe", ["fp32/packed/flash", "fp16/packed/dense/held-ffn"])
def test_a_program_gives_the_stacks_bits(make_case: MakeCase, recipe: str) -> None:
    case = make_case()
    x_BSD, valid_BS = rows_of(case), torch.arange(37).expand(2, 37) != 5
    for mask in (None, torch.ones(2, 37, dtype=torch.bool), valid_BS):
        got_BSD = torch.full_like(x_BSD, torch.nan)
        program = make_program(seeded_state(case), case, parse_recipe(recipe, REFERENCE), torch.device("cpu"))
        program(x_BSD, got_BSD, mask)
        assert torch.equal(got_BSD, run_stack(case, recipe, x_BSD, mask))


def test_rows_with_a_small_token_are_done_again_in_float32_and_no_others() -> None:
    """Row 1 has one small token, later all have invalid ones: these are float32's, the others plain fp16's."""
    case = small(batch_size=4)
    x_BSD = rows_of(case) * 3
    x_BSD[1, 30] *= 0.1
    words = "fp16/packed/dense"
    plain_BSD, exact_BSD = (run_stack(case, kind, x_BSD) for kind in (words, "fp32/packed/flash"))
    got_BSD = torch.full_like(x_BSD, torch.nan)
    program = make_program(
        seeded_state(case), case, parse_recipe(f"{words}/held-small", REFERENCE), torch.device("cpu")
    )
    program(x_BSD, got_BSD)
    for row in range(4):
        assert torch.equal(got_BSD[row], (exact_BSD if row == 1 else plain_BSD)[row])
        assert not torch.equal(exact_BSD[row], plain_BSD[row])
    valid_BS = torch.arange(37).expand(4, 37) < 30
    program(x_BSD, got_BSD, valid_BS)
    assert torch.equal(got_BSD, run_stack(case, "fp32/packed/flash", x_BSD, valid_BS))
