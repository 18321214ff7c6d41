"""The whole stack as one kernel on a card: its numbers, its waits, its captures."""

import dataclasses

import pytest
import torch

from frontier.case import Case
from frontier.chooser import choose
from frontier.fused_canary import fused_canary
from frontier.judge.reference import reference
from frontier.layers.program import make_program
from frontier.layers.stack import StackProgram
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


def program_of(case: Case, words: str = "fp16/stack") -> StackProgram:
    program = make_program(seeded_state(case), case, parse_recipe(words, REFERENCE), torch.device("cuda:0"))
    assert isinstance(program, StackProgram)
    return program


def rows_of(case: Case) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(case.batch_size, case.seq_len, case.d_model, device="cuda", generator=generator)


def small(name: str) -> Case:
    case = Case.load(name)
    return dataclasses.replace(case, batch_size=min(case.batch_size, 300 if case.seq_len <= 128 else 24))


@pytest.mark.parametrize("name", ["2", "4", "5", "7", "9", "10", "11", "12", "13"])
def test_one_kernel_is_right_and_waits_for_what_it_reads(name):
    """Scratch is NaN before each of many calls: a tile that read before others wrote would spread it."""
    case, x_BSD = small(name), rows_of(small(name))
    state = {name: tensor.cuda() for name, tensor in seeded_state(case).items()}
    program, out_BSD = program_of(case), torch.empty_like(x_BSD)
    program(x_BSD, out_BSD)
    first_BSD = out_BSD.clone()
    assert float((first_BSD - reference(x_BSD, state, case, None)).abs().max()) < 2e-3
    (scratch,) = program._scratch.values()
    for _ in range(100):
        out_BSD.fill_(torch.nan)
        scratch.turns[0].qkv.fill_(torch.nan)
        program(x_BSD, out_BSD)
        assert torch.equal(out_BSD, first_BSD)


def test_a_wait_that_is_left_out_would_be_seen():
    """Counters that ran ahead let every tile pass at once: what it then reads is poison."""
    case = small("13")
    x_BSD, program = rows_of(case), program_of(case)
    out_BSD = torch.empty_like(x_BSD)
    program(x_BSD, out_BSD)
    (scratch,) = program._scratch.values()
    scratch.turns[0].published.fill_(1 << 20)
    scratch.turns[0].qkv.fill_(torch.nan)
    program(x_BSD, out_BSD)
    assert not out_BSD.isfinite().all()


@pytest.mark.parametrize("name", ["4", "5", "13"])
def test_masks_on_the_card_are_those_of_the_formula(name):
    case, x_BSD = small(name), rows_of(small(name))
    state = {name: tensor.cuda() for name, tensor in seeded_state(case).items()}
    valid_BS = torch.rand(x_BSD.shape[:2], device="cuda", generator=torch.Generator("cuda").manual_seed(1)) > 0.3
    valid_BS[0] = False
    out_BSD = torch.empty_like(x_BSD)
    program_of(case)(x_BSD, out_BSD, valid_BS)
    wanted_BSD = reference(x_BSD, state, case, valid_BS)
    assert float((out_BSD - wanted_BSD).abs().max()) < 2e-3 and not out_BSD[0].any()
    with_holes_ignored = torch.empty_like(x_BSD)
    program_of(case)(x_BSD, with_holes_ignored)
    assert float((with_holes_ignored - wanted_BSD).abs().max()) > 0.1  # the mask matters


@pytest.mark.parametrize("name", ["4", "5", "7", "13"])
def test_small_rows_are_done_again(name):
    case = small(name)
    x_BSD = rows_of(case)
    x_BSD[::2] *= 1e-3
    state = {name: tensor.cuda() for name, tensor in seeded_state(case).items()}
    wanted_BSD = reference(x_BSD, state, case, None)
    errors = {}
    for words in ("fp16/stack", "fp16/stack/held-small"):
        out_BSD, program = torch.empty_like(x_BSD), program_of(case, words)
        for _ in range(3):
            out_BSD.fill_(torch.nan)
            program(x_BSD, out_BSD)
        errors[words] = float((out_BSD - wanted_BSD)[::2].abs().max())
    assert errors["fp16/stack/held-small"] < 0.1 * errors["fp16/stack"], errors


def test_a_captured_launch_repeats_and_leaves_later_calls_right():
    case = small("5")
    x_BSD, program = rows_of(case), program_of(case, "fp16/stack/held-small")
    out_BSD = torch.empty_like(x_BSD)
    program(x_BSD, out_BSD)
    wanted_BSD, graph = out_BSD.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program(x_BSD, out_BSD)
    for _ in range(5):
        out_BSD.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out_BSD, wanted_BSD)
        program(x_BSD, out_BSD)
        assert torch.equal(out_BSD, wanted_BSD)


def test_two_streams_at_once_do_not_share_scratch():
    case = small("4")
    x_BSD, program = rows_of(case), program_of(case)
    wanted_BSD = torch.empty_like(x_BSD)
    program(x_BSD, wanted_BSD)
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in range(2)], [torch.empty_like(x_BSD) for _ in range(2)]
    for _ in range(200):
        for stream, out_BSD in zip(streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                program(x_BSD, out_BSD)
    torch.cuda.synchronize()
    assert all(torch.equal(out_BSD, wanted_BSD) for out_BSD in outputs)


@pytest.mark.parametrize(
    "words", ["fp16/stack/held-small", "fp16/stack/held-output-small", "fp16/stack-at-once/held-small"]
)
@pytest.mark.parametrize("name", ["1", "6"])
def test_later_calls_are_right_wherever_their_rows_and_masks_lie(name, words):
    """A kernel compiled for addresses in sixteens may not serve others; nor may the quick launcher mix them up."""
    case = small(name)
    x_BSD, program = rows_of(case), program_of(case, words)
    wanted_BSD, mask_BS = torch.empty_like(x_BSD), torch.ones(x_BSD.shape[:2], dtype=torch.bool, device="cuda")
    program(x_BSD, wanted_BSD)
    assert (
        float(
            (wanted_BSD - reference(x_BSD, {n: t.cuda() for n, t in seeded_state(case).items()}, case, None))
            .abs()
            .max()
        )
        < 2e-3
    )
    for offset in (0, 1, 0, 4):
        given, out = (
            torch.zeros(x_BSD.numel() + 4, device="cuda")[offset:][: x_BSD.numel()].view_as(x_BSD) for _ in range(2)
        )
        given.copy_(x_BSD)
        program(given, out)
        assert torch.equal(out, wanted_BSD), offset
        mask = torch.ones(mask_BS.numel() + 4, dtype=torch.bool, device="cuda")[offset:][: mask_BS.numel()]
        program(x_BSD, out, mask.view_as(mask_BS))
        torch.testing.assert_close(out, wanted_BSD, atol=1e-3, rtol=0)


@pytest.mark.parametrize("held", ["held-small", "held-ffn-small", "held-output-small"])
@pytest.mark.parametrize("name", ["1", "2", "5", "7", "12", "13"])
def test_both_turns_in_one_launch_give_what_two_give(name, held):
    """Call after call, over poisoned scratch, other rows hold a small token: none, one, some, all.

    Compiled for two kernels, the same float32 operations may be fused otherwise (seen: 1.7e-6); what half precision
    makes of a small row is wrong by 1e-4 and more. The bits of one kernel's own calls are always the same.
    """
    case = small(name)
    two, one = (program_of(case, f"fp16/{fusion}/{held}") for fusion in ("stack", "stack-at-once"))
    generator = torch.Generator("cuda").manual_seed(5)
    for call in range(40):
        x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device="cuda", generator=generator)
        chosen_B = torch.rand(case.batch_size, device="cuda", generator=generator) < (0, 0.02, 0.5, 1)[call % 4]
        x_BSD[chosen_B, case.seq_len // 2] *= 0.01
        want_BSD, got_BSD, again_BSD = (torch.full_like(x_BSD, torch.nan) for _ in range(3))
        two(x_BSD, want_BSD)
        for out_BSD in (got_BSD, again_BSD):
            for scratch in one._scratch.values():
                for turn in scratch.turns:
                    turn.qkv.fill_(torch.nan)
            one(x_BSD, out_BSD)
        assert torch.equal(got_BSD, again_BSD), call
        torch.testing.assert_close(got_BSD, want_BSD, atol=1e-5, rtol=0)


def test_flags_of_the_first_turn_that_came_too_early_would_be_seen():
    """Flags of this call that stand before it began say that no row is small: the second turn believes them."""
    case = small("2")
    x_BSD, program = rows_of(case) * 0.01, program_of(case, "fp16/stack-at-once/held-small")
    right_BSD, out_BSD = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
    program(x_BSD, right_BSD)
    program(x_BSD, out_BSD)
    assert torch.equal(out_BSD, right_BSD)
    (scratch,) = program._scratch.values()
    (launch,) = scratch.launches
    launch._small.fill_(2 * launch.calls)
    program(x_BSD, out_BSD)
    assert not torch.equal(out_BSD, right_BSD)


@pytest.mark.parametrize("name", ["1", "2", "6", "7", "13"])
def test_the_canary_of_fused_stacks_lets_this_cards_choices_through(name):
    case, machine = Case.load(name), Machine.detect("cuda")
    chosen = choose(case, machine, passes=float("inf")).recipe
    assert chosen.fusion != "by-part" and fused_canary(case, chosen, machine) is None


def test_rows_of_one_position_are_right():
    """Their length is a constant to Triton: the kernel does not take it."""
    case = dataclasses.replace(small("5"), seq_len=1)
    x_BSD, program = rows_of(case), program_of(case, "fp16/stack/held-small")
    out_BSD, state = torch.empty_like(x_BSD), {name: tensor.cuda() for name, tensor in seeded_state(case).items()}
    for _ in range(3):
        program(x_BSD, out_BSD.fill_(torch.nan))
        assert float((out_BSD - reference(x_BSD, state, case, None)).abs().max()) < 2e-3
