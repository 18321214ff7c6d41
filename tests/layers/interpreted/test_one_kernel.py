"""The whole stack as one kernel, under Triton's interpreter, against an independent stack in float64."""

from typing import Any

import pytest
import torch
from plain import plain
from stacks import rows_of, run_stack, small

from frontier.case import Case
from frontier.layers import stack, stack_cut
from frontier.layers.program import make_program, refusal
from frontier.layers.stack import StackProgram
from frontier.layers.stack_cut import Cut
from frontier.layers.weights import State, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

CPU = torch.device("cpu")
HEADS, SINGLE, LOOP = Cut("heads", 16, 32, 32, 4, 1), Cut("single", 16, 32, 16, 4, 2), Cut("loop", 16, 16, 32, 4, 1)
PARTED = LOOP._replace(projection=16)  # q, k and v made in halves


def sized(**sizes: Any) -> Case:
    return small(**{"seq_len": 32, "d_model": 32, "heads": 2, "ffn_dim": 32, "layers": 2, **sizes})


def uneven(case: Case) -> State:
    """Seeded weights with gains and biases of the norms that are not 1 and 0: folding them must matter."""
    state = seeded_state(case)
    generator = torch.Generator().manual_seed(5)
    for name in state:
        if "norm" in name:
            state[name] = state[name] + 0.3 * torch.randn(state[name].shape, generator=generator)
    return state


def exact(case: Case, state: State, x_BSD: torch.Tensor, valid_BS: torch.Tensor | None = None) -> torch.Tensor:
    model = plain(case).double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    return model(x_BSD.double(), valid_BS)


def run(
    monkeypatch: pytest.MonkeyPatch, case: Case, words: str, cut: Cut, valid_BS: torch.Tensor | None = None,
    state: State | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(output, the same in float64) under a cut; twice over poisoned scratch, so that a stale value would show."""
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: cut)
    state, x_BSD = state or uneven(case), rows_of(case)
    program = make_program(state, case, parse_recipe(words, REFERENCE), CPU)
    assert isinstance(program, StackProgram)
    for _ in range(2):
        got_BSD = torch.full_like(x_BSD, torch.nan)
        for scratch in program._scratch.values():
            scratch.turns[0].qkv.fill_(torch.nan)
        program(x_BSD, got_BSD, valid_BS)
    return got_BSD.double(), exact(case, state, x_BSD, valid_BS)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("cut", "sizes"),
    [
        (HEADS, {}),
        (HEADS, {"seq_len": 17}),
        (SINGLE, {}),
        (SINGLE, {"heads": 4, "seq_len": 29}),  # head width 8: two heads share a block
        (LOOP, {"seq_len": 70}),
        (LOOP, {"heads": 4, "seq_len": 33}),  # head width 8: padded
        (LOOP, {"seq_len": 1}),
        (PARTED, {"seq_len": 40}),
        (SINGLE._replace(projection=16), {"heads": 4, "seq_len": 29}),
        (Cut("loop", 32, 16, 32, 4, 1), {"causal": False}),
    ],
    ids=lambda value: value.attend if isinstance(value, Cut) else str(value),
)
def test_one_kernel_is_as_near_to_float64_as_half_precision_by_parts(
    monkeypatch: pytest.MonkeyPatch, cut: Cut, sizes: dict[str, Any], masked: bool
) -> None:
    case = sized(**sizes)
    valid_BS = torch.arange(case.seq_len).expand(2, case.seq_len) % 5 != 1 if masked else None
    got_BSD, exact_BSD = run(monkeypatch, case, "fp16/stack", cut, valid_BS)
    theirs = float((run_stack(case, "fp16/packed/dense", rows_of(case)).double() - exact(
        case, seeded_state(case), rows_of(case)
    )).abs().max())  # fmt: skip
    ours = float((got_BSD - exact_BSD).abs().max())
    assert 0 < ours <= 3 * theirs, (ours, theirs)


@pytest.mark.parametrize(
    ("words", "most"), [("tf32x3/stack", 2e-5), ("fp16/stack/held-all", 1.5e-3), ("fp16/stack/held-ffn", 2e-3)]
)
def test_higher_precisions_are_nearer(monkeypatch: pytest.MonkeyPatch, words: str, most: float) -> None:
    got_BSD, exact_BSD = run(monkeypatch, sized(), words, SINGLE)
    assert float((got_BSD - exact_BSD).abs().max()) < most


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("cut", "sizes"),
    [(SINGLE, {}), (SINGLE, {"heads": 4, "seq_len": 29}), (LOOP, {"seq_len": 40}), (PARTED, {"seq_len": 40})],
)
def test_where_the_gemms_are_held_attention_weighs_both_halves_of_v(
    monkeypatch: pytest.MonkeyPatch, cut: Cut, sizes: dict[str, Any], masked: bool
) -> None:
    """A first token sees itself alone: what attention gives it is v, and only its rounding is wrong."""
    case, errors = sized(**sizes), []
    valid_BS = torch.arange(case.seq_len).expand(2, case.seq_len) % 5 != 1 if masked else None
    for splits in (True, False):
        if not splits:
            for module in (stack, stack_cut):
                monkeypatch.setattr(module, "splits_values", lambda *given: False)
        got_BSD, exact_BSD = run(monkeypatch, case, "fp16/stack/held-all", cut, valid_BS)
        errors.append(float((got_BSD - exact_BSD)[:, 0].abs().max()))
    assert errors[0] < 5e-6 < 5e-5 < errors[1], errors


@pytest.mark.parametrize("padding", [0, 20], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("cut", "sizes"), [(SINGLE, {}), (SINGLE, {"heads": 4}), (LOOP, {"seq_len": 40}), (PARTED, {"seq_len": 40})]
)
def test_first_tokens_are_nearer_where_out_has_both_halves(
    monkeypatch: pytest.MonkeyPatch, cut: Cut, sizes: dict[str, Any], padding: int
) -> None:
    """All weights of the output projection lose 0.45 of their last digit to rounding, which so adds up.

    The first token stands in the first tile of 16; behind 20 tokens of padding in the second.
    """
    case, errors = sized(layers=1, **sizes), {}
    state = seeded_state(case)
    name = "layers.0.attention.out_proj.weight"
    state[name] = state[name].sign() * (1 + 0.45 * 2**-10) / 8
    values_OI = state["layers.0.attention.v_proj.weight"].zero_()
    values_OI[:, 0] = 1  # each is the first channel: rounded to half precision once
    state["layers.0.ffn_out.weight"].zero_()
    valid_BS = torch.arange(case.seq_len).expand(2, case.seq_len) >= padding if padding else None
    for words in ("fp16/stack", "fp16/stack/held-output"):
        got_BSD, exact_BSD = run(monkeypatch, case, words, cut, valid_BS, state)
        errors[words] = float((got_BSD - exact_BSD)[:, padding].pow(2).mean().sqrt())
    assert errors["fp16/stack/held-output"] < 0.6 * errors["fp16/stack"], errors


@pytest.mark.parametrize("cut", [HEADS, SINGLE, LOOP], ids=lambda cut: cut.attend)
def test_rows_with_a_small_token_are_done_again_in_higher_precision_and_no_others(
    monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    """One late token of row 0 is small: all of that row is as under tf32x3, row 1 as under plain fp16."""
    again = Cut("loop", 32, 16, 32, 4, 1)
    case, state = sized(), uneven(sized())
    x_BSD = rows_of(case) * 3
    x_BSD[0, 29] *= 0.1
    outputs = {}
    for words in ("fp16/stack", "tf32x3/stack", "fp16/stack/held-small"):
        exact = words.startswith("tf32x3")
        monkeypatch.setattr(
            stack_cut, "cut_of", lambda *given, exact=exact: again if exact or "second" in given else cut
        )
        program = make_program(state, case, parse_recipe(words, REFERENCE), CPU)
        for _ in range(2):
            outputs[words] = torch.full_like(x_BSD, torch.nan)
            program(x_BSD, outputs[words])
    plain_BSD, exact_BSD, small_BSD = outputs.values()
    assert torch.equal(small_BSD[0], exact_BSD[0]) and not torch.equal(small_BSD[0], plain_BSD[0])
    assert torch.equal(small_BSD[1], plain_BSD[1]) and not torch.equal(small_BSD[1], exact_BSD[1])


def test_an_invalid_token_makes_no_row_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: SINGLE)
    case = sized()
    valid_BS = torch.arange(32).expand(2, 32) < 20
    outputs = [torch.empty(2, 32, 32) for _ in range(2)]
    for words, out_BSD in zip(("fp16/stack", "fp16/stack/held-small"), outputs, strict=True):
        make_program(seeded_state(case), case, parse_recipe(words, REFERENCE), CPU)(
            rows_of(case) * 3, out_BSD, valid_BS
        )
    assert torch.equal(*outputs)


def test_what_overflows_half_precision_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sized()
    state = seeded_state(case)
    state["layers.0.ffn_in.weight"] *= 1e6
    state["layers.0.ffn_out.weight"] *= 1e-6  # what lies between them passes 65,504
    x_BSD = rows_of(case)
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: LOOP)
    outputs = []
    for words in ("fp16/stack", "fp16/stack/held-small"):
        out_BSD = torch.empty_like(x_BSD)
        make_program(state, case, parse_recipe(words, REFERENCE), CPU)(x_BSD, out_BSD)
        outputs.append(out_BSD)
    assert not outputs[0].isfinite().all()
    assert torch.allclose(outputs[1].double(), exact(case, state, x_BSD), atol=2e-3)


def test_a_row_without_a_valid_token_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    valid_BS = torch.ones(2, 32, dtype=torch.bool)
    valid_BS[1] = False
    for cut in (HEADS, SINGLE, LOOP):
        got_BSD, exact_BSD = run(monkeypatch, sized(), "fp16/stack", cut, valid_BS)
        assert not got_BSD[1].any() and torch.allclose(got_BSD[0], exact_BSD[0], atol=2e-3)


def test_what_an_invalid_token_holds_cannot_reach_a_valid_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sized()
    monkeypatch.setattr(stack_cut, "cut_of", lambda *given: SINGLE)
    program = make_program(seeded_state(case), case, parse_recipe("fp16/stack", REFERENCE), CPU)
    valid_BS = torch.arange(32).expand(2, 32) >= 3  # left padding
    outputs = []
    for held in (0.0, torch.nan, 1e30):
        x_BSD, out_BSD = rows_of(case), torch.empty(2, 32, 32)
        x_BSD[:, :3] = held
        program(x_BSD, out_BSD, valid_BS)
        outputs.append(out_BSD)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("cut", [HEADS, SINGLE, LOOP], ids=lambda cut: cut.attend)
def test_a_folding_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch, cut: Cut) -> None:
    """Planted: the softmax scale without log2(e), a gain that is not folded, a value's bias that is dropped."""
    case = sized()
    whole = stack.pack_weights

    def without(name: str) -> Any:
        def packed(state: State, *rest: Any, **more: Any) -> Any:
            return whole({**state, name: torch.full_like(state[name], 1.0 if "weight" in name else 0.0)}, *rest, **more)

        return packed

    for name in ("layers.1.norm1.weight", "layers.0.norm2.bias", "layers.0.attention.v_proj.bias", "final_norm.weight"):
        with monkeypatch.context() as planted:
            planted.setattr(stack, "pack_weights", without(name))
            got_BSD, exact_BSD = run(planted, case, "fp16/stack", cut)
            assert float((got_BSD - exact_BSD).abs().max()) > 1e-2, name
    with monkeypatch.context() as planted:
        planted.setattr("frontier.layers.stack.math.log2", lambda value: 1.0)
        got_BSD, exact_BSD = run(planted, case, "fp16/stack", cut)
        assert float((got_BSD - exact_BSD).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("words", "sizes", "reason"),
    [
        ("fp16/stack", {"d_model": 48}, "d_model 48, one kernel holds powers of two from 16 to 128"),
        ("fp16/stack", {"d_model": 256}, "d_model 256"),
        ("fp16/stack", {"ffn_dim": 48}, "ffn_dim 48"),
        ("fp16/stack", {"heads": 8}, "head width 4, one kernel needs 8"),
        ("fp16/stack", {"causal": False, "seq_len": 129}, "129 positions without a causal mask"),
        ("fp16/stack", {"seq_len": 5000}, "5,000 positions"),
        ("fp32/stack", {}, "one kernel multiplies on tensor cores"),
        ("fp16/stack/held-projections", {}, "held-projections: one kernel holds the feed-forward GEMMs"),
        ("tf32x3/stack/held-all", {}, "held-all holds GEMMs beside fp16"),
    ],
)
def test_what_one_kernel_cannot_serve_is_refused_by_name(words: str, sizes: dict[str, Any], reason: str) -> None:
    told = refusal(sized(**sizes), parse_recipe(words, REFERENCE), Machine.detect("cpu"))
    assert told is not None and told.startswith(reason)
