"""Chunked rows on a card: each kernel's log-sum-exp, the flow against whole rows, late kernels, honest bytes."""

import dataclasses
import math

import pytest
import torch
from test_card import FP16, KERNELS, _lanes

from frontier.case import Case
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.flows.engine import Engine, NotFinite
from frontier.layers.attention import ATTENTION, Kernel
from frontier.layers.block import forward, matmul_precision
from frontier.layers.canary import why_not
from frontier.layers.merge import merge
from frontier.layers.weights import pack, seeded_state
from frontier.machine import Machine
from frontier.planner import Keeping, Plan, plan
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.spans import Span
from frontier.units import GIB

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]


@pytest.fixture
def machine() -> Machine:
    return Machine.detect("cuda")


def kernel_here(name: str, case: Case, machine: Machine) -> Kernel:
    if (reason := ATTENTION[name].refuses(case, parse_recipe(name, FP16), machine)) is not None:
        pytest.skip(reason)
    return ATTENTION[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(1, 1, True), (7, 7, True), (33, 33, True), (1000, 1000, True), (16_385, 16_385, True), (7, 33, False),
     (33, 7, False), (1, 1000, False), (1000, 1, False), (4096, 16_385, False), (16_385, 4096, False)],
)  # fmt: skip
@pytest.mark.parametrize("name", KERNELS)
def test_context_and_log_sum_exp_equal_float64(machine, name, queries, keys, causal, dtype):
    attend = kernel_here(name, Case.load("14"), machine).attend_lse
    packed = torch.randn(1, max(queries, keys), 3, 2, 64, device="cuda").to(dtype)
    q, k, v = packed[:, :queries, 0], packed[:, :keys, 1], packed[:, :keys, 2]
    context, lse = attend(q, k, v, causal)
    assert lse.shape == (1, 2, queries) and lse.dtype == torch.float32
    rows = sorted({0, queries // 2, queries - 1, max(0, queries - 2)})
    scores = torch.einsum("bqhk,bshk->bhqs", q[:, rows].double(), k.double()) / 8
    if causal:
        hidden = torch.arange(keys, device="cuda")[None, :] > torch.tensor(rows, device="cuda")[:, None]
        scores.masked_fill_(hidden, -math.inf)
    want = torch.einsum("bhqs,bshk->bqhk", scores.softmax(-1), v.double())
    assert float((lse[..., rows].double() - scores.logsumexp(-1)).abs().max()) < 4e-3
    limit = 4e-3 if dtype is torch.float16 else 1e-2
    assert float((context[:, rows].double() - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("name", KERNELS)
def test_the_canary_lets_chunks_through_and_stops_base_2(machine, name, monkeypatch):
    case, recipe = Case.load("14"), parse_recipe(name, FP16)
    right = kernel_here(name, case, machine)
    for causal in (True, False):
        assert why_not(case.override(causal=causal), recipe, machine, chunk=16_384) is None

    def base_2(q, k, v, causal):
        context, lse = right.attend_lse(q, k, v, causal)
        return context, lse / math.log(2)

    monkeypatch.setitem(ATTENTION, name, right._replace(attend_lse=base_2))
    assert "wrong log-sum-exp" in (why_not(case, recipe, machine, chunk=16_384) or "")


def test_the_merge_on_the_card_equals_float64_for_half_blocks():
    out, lse = torch.randn(1000, 4, 64, device="cuda"), torch.randn(4, 1000, device="cuda") * 50
    block, block_lse = torch.randn(1000, 4, 64, device="cuda").half(), torch.randn(4, 1000, device="cuda") * 50
    total = torch.logaddexp(lse.double(), block_lse.double())
    shares = [(part.double() - total).exp().t()[..., None] for part in (lse, block_lse)]
    want = shares[0] * out.double() + shares[1] * block.double()
    merge(out, lse, block, block_lse)
    assert float((out - want).abs().max()) < 5e-6 and float((lse - total).abs().max()) < 2e-5


def cut(
    case: Case, machine: Machine, recipe: Recipe = FP16, chunk: int = 700, spool: str = "host", depth: int = 3
) -> Plan:
    made = plan(case, machine, recipe, Keeping(output="memory"), chunk=chunk, ring_depth=depth)
    return dataclasses.replace(made, spool=spool)


def through(made: Plan, valid_BS=None, lanes=None, **options) -> torch.Tensor:
    sink = MemorySink(made.case)
    with Engine(made, seeded_state(made.case), valid_BS) as engine:
        if lanes is not None:
            engine.lanes = lanes(engine.device)
        engine.run_pass(SeededSource(made.case, 4), sink, **options)
    return sink.host_BSD


def small(**changes) -> Case:
    return Case.load("14").override(**({"batch_size": 2, "seq_len": 3001} | changes))


def reference(case: Case, valid_BS=None) -> torch.Tensor:
    x_BSD = torch.empty(case.batch_size, case.seq_len, case.d_model)
    SeededSource(case, 4).read(Span(0, case.batch_size), x_BSD)
    x_BSD = x_BSD.cuda()
    with matmul_precision(REFERENCE):
        forward(x_BSD, x_BSD, pack(seeded_state(case), case, REFERENCE, x_BSD.device), case, REFERENCE, valid_BS)
    return x_BSD.cpu()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_chunks_are_as_near_to_float32_as_whole_rows(machine, name, causal, masked):
    case, recipe = small(causal=causal), parse_recipe(name, FP16)
    kernel_here(name, case, machine)
    valid_BS = None
    if masked:
        valid_BS = torch.rand(2, 3001, generator=torch.Generator().manual_seed(1)) > 0.4
        valid_BS[0, :1500] = False
    want = reference(case, valid_BS)
    whole = through(plan(case, machine, recipe, Keeping(output="memory"), slice_rows=1), valid_BS)
    whole_error = float((whole - want).abs().max())
    cuts = [cut(case, machine, recipe, spool=spool) for spool in ("card", "pinned", "host")]
    outputs = [through(made, valid_BS, poison=True) for made in cuts]
    for got in outputs:
        error = float((got - want).abs().max())
        assert error <= 2 * whole_error and error < case.atol
    # On the card a chunk meets all keys on one side of it in one call: the same to rounding.
    assert float((outputs[0] - outputs[1]).abs().max()) <= 2 * whole_error
    assert torch.equal(*outputs[1:])


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_and_late_kernels_change_no_bit(machine, depth):
    case = small(seq_len=2000)
    want = through(cut(case, machine, depth=1))
    for spool in ("card", "pinned"):
        one, deep = (through(cut(case, machine, spool=spool, depth=n), poison=True) for n in (1, depth))
        assert torch.equal(one, deep) and (spool == "card" or torch.equal(one, want))
    assert torch.equal(through(cut(case, machine, depth=depth), poison=True), want)
    assert torch.equal(through(cut(case, machine, depth=depth), lanes=_lanes(), poison=True), want)


@pytest.mark.parametrize("spool", ["host", "pinned"])
@pytest.mark.parametrize("drop", ["upload", "download", "mark"])
def test_poison_catches_a_dropped_wait(machine, drop, spool):
    case = small(seq_len=2000)
    right = through(cut(case, machine, spool=spool))
    try:
        got = through(cut(case, machine, spool=spool), lanes=_lanes(drop=drop, spin=drop != "upload"), poison=True)
    except NotFinite:
        return
    assert not torch.equal(got, right), "a dropped wait went unseen: the check itself is blind"


@pytest.mark.parametrize(("gib", "spool"), [(2.0, "pinned"), (12.0, "card")])
def test_the_measured_peak_of_a_long_row_is_planned(gib, spool):
    case = Case.load("14").override(batch_size=1, seq_len=300_000, layers=1)
    tight = Machine.detect("cuda", device_budget_bytes=int(gib * GIB))
    tight.limit_allocator()
    try:
        made = plan(case, tight, FP16, flow="chunked")
        assert made.spool == spool
        with Engine(made, seeded_state(case)) as engine:
            engine.run_pass(SeededSource(case, 16), MemorySink(case))
            peaks = engine.peaks()
        assert 0.7 * made.allocator_bytes <= peaks["device_peak_bytes"] <= made.allocator_bytes, peaks
    finally:
        Machine.detect("cuda").limit_allocator()


def test_an_overflow_of_half_precision_is_found_in_its_layer(machine):
    case = small(seq_len=2000)
    state = {name: tensor.clone() for name, tensor in seeded_state(case).items()}
    state["layers.0.ffn_in.weight"] *= 1e6
    source = SeededSource(case, 4)
    with Engine(cut(case, machine), state) as engine:
        with pytest.raises(NotFinite):
            engine.run_pass(source, MemorySink(case))
        fault = engine.find_fault(0, source)
    assert fault is not None and fault.layer == "layer 0" and fault.position < 700
