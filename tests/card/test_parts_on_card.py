"""Replaceable parts on a card: each recipe against the reference, graphs that alias nothing, offsets past 2^31."""

import threading

import pytest
import torch

from frontier.case import Case
from frontier.layers.attention import ATTENTION
from frontier.layers.canary import why_not
from frontier.layers.costs import MOST_GRAPHS, workspace_bytes
from frontier.layers.join import torch_join, triton_join
from frontier.layers.program import make_program, refusal
from frontier.layers.weights import Norm, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
DEVICE = torch.device("cuda:0")
RECIPES = [
    "fp32/separate/dense", "fp32/packed/efficient/graph", "tf32/packed/short", "fp16/packed/efficient",
    "fp16/packed/short/triton-join/triton-ffn/graph", "fp16/packed/scores/triton-join", "fp16/packed/cudnn/compile",
    "fp16/packed/short/triton-join/held-all/graph", "fp16/packed/flash/compile-reduce-overhead",
    "fp16/packed/short/triton-ffn/held-projections",
]  # fmt: skip


@pytest.fixture
def machine() -> Machine:
    return Machine.detect("cuda")


def rows_of(case: Case, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(case.batch_size, case.seq_len, case.d_model, device=DEVICE, generator=generator)


def program_of(case: Case, words: str):
    return make_program(seeded_state(case), case, parse_recipe(words, REFERENCE), DEVICE)


def run(program, x, valid=None):
    out = torch.full_like(x, torch.nan)
    program(x, out, valid)
    return out


def assert_within(case: Case, got, want) -> None:
    error = (got.double() - want.double()).abs()
    failing = ~((error < case.atol) | (error < case.rtol * want.double().abs()))
    assert not bool(failing.any()), f"{int(failing.sum())} elements fail, worst {float(error.max()):.2g}"


@pytest.mark.parametrize("name", ["3", "8", "9", "11", "12", "13"])
@pytest.mark.parametrize("words", RECIPES)
def test_each_recipe_is_within_the_rule(machine, words, name):
    case, recipe = Case.load(name), parse_recipe(words, REFERENCE)
    reason = refusal(case, recipe, machine)
    if reason is not None:
        pytest.skip(reason)
    x = rows_of(case)
    want, program = run(program_of(case, "fp32/separate/dense"), x), program_of(case, words)
    first, second = run(program, x), run(program, x * 2)
    assert_within(case, first, want)
    assert_within(case, run(program, x, torch.ones(x.shape[:2], dtype=torch.bool, device=DEVICE)), want)
    assert_within(case, second, run(program_of(case, "fp32/separate/dense"), x * 2))
    assert torch.equal(x, rows_of(case))
    with pytest.raises(AssertionError):  # the check itself sees a fault
        assert_within(case, first * 1.05, want)


@pytest.mark.parametrize("width", [8, 32, 64, 128, 256])
@pytest.mark.parametrize("words", ["fp16/packed/short", "bf16/packed/short", "tf32/packed/short", "fp16/packed/scores"])
def test_the_triton_kernels_pass_the_canary_at_every_head_width(machine, words, width):
    for seq_len in (1, 32, 128, 1000, 4096):
        for causal in (True, False):
            case = Case.load("1").override(d_model=2 * width, heads=2, ffn_dim=64, seq_len=seq_len, causal=causal)
            assert why_not(case, parse_recipe(words, REFERENCE), machine) is None, (seq_len, causal)


def test_graphs_of_many_shapes_hold_bounded_memory(machine):
    case, words = Case.load("1"), "fp16/packed/short/triton-join/graph"
    program, held = program_of(case, words), []
    for batch in range(64, 24, -1):
        x = rows_of(case)[:batch]
        out = run(program, x)
        torch.cuda.synchronize()
        assert bool(torch.isfinite(out).all())
        held.append(torch.cuda.memory_reserved())
    assert max(held[MOST_GRAPHS:]) <= held[0] + 2 * sum(
        workspace_bytes(case, parse_recipe(words, REFERENCE), case.batch_size).values()
    ), held


def test_two_graphed_stacks_on_two_streams_of_two_threads_disturb_nothing():
    case = Case.load("8").override(batch_size=8)
    x, program = rows_of(case), program_of(case, "fp16/packed/efficient/graph")
    other = program_of(case, "fp16/packed/efficient/graph")
    want, outs = run(program, x), {}
    run(other, x)

    def work(name, mine):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs[name] = [run(mine, x) for _ in range(50)]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in (("a", program), ("b", other), ("c", program))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 3 and all(torch.equal(out, want) for each in outs.values() for out in each)


def test_a_graph_outlives_the_workspaces_of_others():
    """Inductor drops all of cuBLAS's workspaces before it records: what a graph uses must lie in its own pool."""
    case = Case.load("8").override(batch_size=8)
    x, program = rows_of(case), program_of(case, "fp16/packed/cudnn/triton-join/graph")
    want = run(program, x)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filled = [torch.full((32 << 20,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(8)]
    assert torch.equal(run(program, x), want) and all(bool((f == 255).all()) for f in filled)


def test_a_graph_inside_a_callers_capture():
    case = Case.load("3")
    x, program = rows_of(case), program_of(case, "fp16/packed/short/graph")
    want, out, graph = run(program, x), torch.empty_like(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program(x, out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_a_join_past_two_to_the_31_elements():
    T, D = (1 << 21) + 9, 1024
    norm = Norm(torch.randn(D, device=DEVICE), torch.randn(D, device=DEVICE))
    x = torch.zeros(T, D, device=DEVICE)
    x[-16:] = torch.randn(16, D, device=DEVICE)
    tail, added = x[-16:].clone(), torch.ones(T, D, device=DEVICE, dtype=torch.float16)
    h = triton_join(x, added, norm, torch.float16)
    want = torch_join(tail, added[-16:], norm, torch.float16)
    assert torch.equal(x[-16:], tail) and float((h[-16:] - want).abs().max()) < 2e-2
    assert bool((x[:-16] == 1).all())


def test_short_attention_past_two_to_the_31_elements():
    B, S, H, K = 1367, 1024, 8, 64  # 3 x 8 x 64 x 1,024 x 1,367 is past 2^31
    qkv = torch.randn(B, S, 3, H, K, device=DEVICE, dtype=torch.float16)
    q, k, v = qkv.unbind(2)
    assert qkv.numel() > 1 << 31
    got = ATTENTION["short"].attend(q, k, v, True)
    want = ATTENTION["dense"].attend(q[-2:], k[-2:], v[-2:], True)
    assert float((got[-2:] - want).abs().max()) < 5e-3
