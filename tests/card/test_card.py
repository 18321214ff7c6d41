"""What only a card can show: kernels at full length, lanes under load, a budget that is real."""

import math
import threading

import pytest
import torch

from frontier.case import Case
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.errors import DoesNotFit
from frontier.flows.engine import Engine, NotFinite
from frontier.layers import attention
from frontier.layers.block import forward, matmul_precision
from frontier.layers.canary import canary, why_not
from frontier.layers.weights import pack, seeded_state
from frontier.machine import Machine
from frontier.planner import Keeping, plan
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.spans import Span
from frontier.stream import lanes as lanes_module
from frontier.stream.pinned import PinnedBuffer
from frontier.units import GIB

pytestmark = [pytest.mark.card, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
FP16 = parse_recipe("fp16/packed/cudnn", REFERENCE)
KERNELS = ("cudnn", "flash", "efficient", "fa4")
SPIN_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture
def machine() -> Machine:
    return Machine.detect("cuda")


def small(**changes) -> Case:
    return Case.load("14").override(batch_size=7, seq_len=1500, **changes)


def run(case: Case, machine: Machine, recipe: Recipe = FP16, depth: int = 3, lanes=None, **options) -> torch.Tensor:
    planned = plan(case, machine, recipe, Keeping(output="memory"), ring_depth=depth, slice_rows=1)
    sink = MemorySink(case)
    with Engine(planned, seeded_state(case)) as engine:
        if lanes is not None:
            engine.lanes = lanes(engine.device)
        engine.run_pass(SeededSource(case, 4), sink, **options)
    return sink.host_BSD


@pytest.mark.parametrize("length", [65_536, 65_537, 100_000])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_that_is_offered_is_right_at_full_length(machine, kernel, length):
    case, recipe = Case.load("14").override(seq_len=length), parse_recipe(kernel, FP16)
    reason = attention.ATTENTION[kernel].refuses(case, recipe, machine)
    if reason is not None:
        pytest.skip(reason)
    for causal in (True, False):
        assert canary(case.override(causal=causal), recipe, machine) is None


@pytest.mark.parametrize("fault", ["scale", "dropped keys", "mask"])
def test_the_canary_catches_a_wrong_kernel_at_full_length(machine, monkeypatch, fault):
    case, right = Case.load("14"), attention.ATTENTION["cudnn"]

    def wrong(q, k, v, causal):
        if fault == "scale":
            return right.attend(q * 2, k, v, causal)
        if fault == "mask":
            return right.attend(q, k, v, not causal)
        out = right.attend(q, k, v, causal).clone()
        out[:, 70_000:] = out[:, 60_000:90_000].clone()
        return out

    monkeypatch.setitem(attention.ATTENTION, "cudnn", attention.Kernel(wrong, right.refuses))
    assert "wrong numbers" in (why_not(case, FP16, machine) or "")


@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_stays_within_the_rule_of_float64(machine, kernel):
    case, recipe = small(), parse_recipe(kernel, FP16)
    if attention.ATTENTION[kernel].refuses(case, recipe, machine):
        pytest.skip("refused here")
    state, x_BSD = seeded_state(case), torch.randn(1, 1500, 1024, device="cuda")
    wanted, got = torch.empty_like(x_BSD), torch.empty_like(x_BSD)
    with matmul_precision(REFERENCE):
        forward(x_BSD, wanted, pack(state, case, REFERENCE, x_BSD.device), case, REFERENCE)
    forward(x_BSD, got, pack(state, case, recipe, x_BSD.device), case, recipe)
    assert float((got - wanted).abs().max()) < case.atol
    assert not torch.equal(got, wanted)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_depth_and_poison_change_no_bit(machine, depth):
    case = small()
    assert torch.equal(run(case, machine, depth=depth, poison=True), run(case, machine, depth=1))


class _Hooked(lanes_module.CudaLanes):
    """CUDA lanes whose work is replaced by spin kernels around it, or whose waits are dropped."""

    spin = True
    drop = ""

    def carry(self, span, slot, work, poison):
        def late_work(rows, device_in, device_out, note):
            torch.cuda._sleep(SPIN_CYCLES)
            work(rows, device_in, device_out, note)
            torch.cuda._sleep(SPIN_CYCLES)

        if self.drop == "upload":  # compute no longer waits for its input, which comes late
            with torch.cuda.stream(self.upload):
                torch.cuda._sleep(SPIN_CYCLES)
            self.compute.wait_event = lambda event: None
        if self.drop == "download":
            self.download.wait_event = lambda event: None
        try:
            mark = super().carry(span, slot, late_work if self.spin else work, poison)
        finally:  # the lanes are the process's own
            for lane in (self.compute, self.download):
                lane.__dict__.pop("wait_event", None)
        # Without its waits a trip's marks come in no order, so its times mean nothing.
        landed = mark._marks[-1][1]
        mark.wait = lambda: [] if self.drop == "mark" else ([], landed.synchronize())[0]
        return mark


def _lanes(**settings):
    return type("Lanes", (_Hooked,), settings)


def test_late_kernels_change_no_bit(machine):
    case = small()
    assert torch.equal(run(case, machine, lanes=_lanes(), poison=True), run(case, machine))


@pytest.mark.parametrize("drop", ["upload", "download", "mark"])
def test_poison_catches_a_dropped_wait(machine, drop):
    case = small()
    right = run(case, machine)
    try:
        got = run(case, machine, lanes=_lanes(drop=drop, spin=drop != "upload"), poison=True)
    except NotFinite:
        return
    assert not torch.equal(got, right), "a dropped wait went unseen: the check itself is blind"


def test_a_hostile_allocator_changes_no_bit(machine):
    case, stop = small(), threading.Event()

    def hostile():
        while not stop.is_set():
            torch.full((64, 1 << 20), math.nan, device="cuda")

    right = run(case, machine)
    thread = threading.Thread(target=hostile)
    thread.start()
    try:
        got = run(case, machine)
    finally:
        stop.set()
        thread.join()
    assert torch.equal(got, right)


def test_engines_made_again_and_again_hold_no_more(machine):
    case = small()
    for turn in range(6):
        run(case, machine)
        if turn == 1:
            settled = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= settled


def test_the_measured_peak_is_planned_and_the_budget_is_real(machine):
    case = Case.load("14").override(batch_size=4)
    tight = Machine.detect("cuda", device_budget_bytes=6 * GIB)
    tight.limit_allocator()
    try:
        planned = plan(case, tight, FP16)
        with Engine(planned, seeded_state(case)) as engine:
            engine.run_pass(SeededSource(case, 16), MemorySink(case))
            peaks = engine.peaks()
            assert 0.9 * planned.allocator_bytes <= peaks["device_peak_bytes"] <= planned.allocator_bytes, peaks
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(5 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        Machine.detect("cuda").limit_allocator()


def test_running_out_of_memory_part_way_shows_the_plan(machine):
    case = Case.load("14").override(batch_size=2)
    planned = plan(case, machine, FP16)
    tight = Machine.detect("cuda", device_budget_bytes=2 * GIB)
    tight.limit_allocator()
    try:
        with pytest.raises(DoesNotFit, match="ran out of memory"), Engine(planned, seeded_state(case)) as engine:
            engine.run_pass(SeededSource(case, 16), MemorySink(case))
    finally:
        Machine.detect("cuda").limit_allocator()
        torch.cuda.empty_cache()


def test_an_overflow_of_half_precision_is_found_and_float32_holds_it(machine):
    case = small()
    state = {name: tensor.clone() for name, tensor in seeded_state(case).items()}
    state["layers.1.ffn_in.weight"] *= 1e6
    for recipe, overflows in ((FP16, True), (parse_recipe("fp32/packed/efficient", REFERENCE), False)):
        planned = plan(case, machine, recipe, slice_rows=1)
        with Engine(planned, state) as engine:
            source, sink = SeededSource(case, 4), MemorySink(case)
            if overflows:
                with pytest.raises(NotFinite):
                    engine.run_pass(source, sink)
                assert bool(torch.isnan(sink.host_BSD).all()), "a slice that is not finite was written"
            else:
                engine.run_pass(source, sink)


def test_extremes_show_nan_and_infinity(machine):
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(3, 1000, device="cuda")
        x[1, 500] = bad
        low, high = torch.aminmax(x)
        assert not (math.isfinite(float(low)) and math.isfinite(float(high)))


def test_masks_on_the_card_equal_rows_without_their_invalid_tokens(machine):
    case = small()
    valid_BS = torch.rand(7, 1500) > 0.3
    valid_BS[3] = False
    planned = plan(case, machine, FP16, slice_rows=1)
    sink = MemorySink(case)
    with Engine(planned, seeded_state(case), valid_BS) as engine:
        engine.run_pass(SeededSource(case, 4), sink)
        row_BSD = torch.empty(1, 1500, 1024)
        SeededSource(case, 4).read(Span(5, 6), row_BSD)
        kept_BSD = row_BSD[:, valid_BS[5]].cuda()
        engine.flow.program(kept_BSD, kept_BSD)
    assert torch.equal(sink.host_BSD[5][valid_BS[5]], kept_BSD[0].cpu())
    assert bool((sink.host_BSD[5][~valid_BS[5]] == 0).all()) and bool((sink.host_BSD[3] == 0).all())


def test_pinned_memory_is_of_exact_size_and_pinned():
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    buffer = PinnedBuffer(3, 1000, 1024)
    assert buffer.tensor.is_pinned() and buffer.num_bytes == 3 * 1000 * 1024 * 4
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == before
    buffer.release()
