"""A plan fits every budget by a ledger that adds up, or is refused with the sum."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper import card, laptop, small

from frontier.case import Case
from frontier.errors import DoesNotFit, FrontierError, Unsupported
from frontier.layers.costs import MOST_ELEMENTS, most_rows_per_call
from frontier.machine import CONTEXT_BYTES, Machine
from frontier.planner import PLACES, Keeping, Plan, budgets, host_total_bytes, plan
from frontier.recipe import REFERENCE, WORDS, Recipe, parse_recipe
from frontier.units import GIB, MIB, parse_bytes, show_bytes

FAST = parse_recipe("fp16/packed/cudnn", REFERENCE)
PACKED = parse_recipe("fp32/packed/efficient", REFERENCE)
C14 = Case.load("14")


def within_budgets(made: Plan, free_disk_bytes: int | None = None) -> bool:
    held = {place: made.held_bytes(place) for place in PLACES} | {"host": host_total_bytes(made)}
    return all(limit is None or held[place] <= limit for place, limit in budgets(made.machine, free_disk_bytes).items())


@pytest.mark.parametrize("recipe", [FAST, PACKED, REFERENCE], ids=str)
@pytest.mark.parametrize("name", [str(n) for n in range(1, 14)])
def test_the_thirteen_small_cases_fit_an_h200_whole_or_in_slices(name: str, recipe: Recipe) -> None:
    made = plan(Case.load(name), card(), recipe)
    assert within_budgets(made)
    assert (made.num_slices - 1) * made.slice_rows < made.case.batch_size <= made.num_slices * made.slice_rows
    assert made.ring_depth <= made.num_slices


def test_the_ledger_adds_up_in_every_place() -> None:
    keeping = Keeping(resident_input=True, output="memory", watch=(0, 1, 2), masked=True)
    made = plan(C14, card(), FAST, keeping)
    for place in PLACES:
        assert made.held_bytes(place) == sum(e.num_bytes for e in made.ledger if e.place == place)
        assert made.as_dict()["planned_bytes"][place] == made.held_bytes(place)
    assert sum(made.held_bytes(place) for place in PLACES) == sum(e.num_bytes for e in made.ledger)
    assert made.held_bytes("pinned") == 2 * made.ring_depth * made.slice_rows * C14.row_bytes
    assert made.allocator_bytes == made.held_bytes("card") - CONTEXT_BYTES
    assert host_total_bytes(made) == made.held_bytes("pinned") + made.held_bytes("host")
    assert all(entry.num_bytes >= 0 for entry in made.ledger)


@pytest.mark.parametrize(
    ("keeping", "name", "place", "num_bytes"),
    [
        (Keeping(resident_input=True), "resident input", "host", C14.input_bytes),
        (Keeping(output="memory"), "output", "host", C14.input_bytes),
        (Keeping(output="file"), "output", "disk", C14.input_bytes),
        (Keeping(watch=(0, 1, 2)), "3 watched rows", "host", 3 * C14.row_bytes),
        (Keeping(masked=True), "a row without its invalid tokens", "card", C14.row_bytes),
    ],
)
def test_what_a_run_keeps_is_in_the_ledger_and_nothing_else_is(
    keeping: Keeping, name: str, place: str, num_bytes: int
) -> None:
    bare, kept = plan(C14, card(), FAST), plan(C14, card(), FAST, keeping)
    more = {entry for entry in set(kept.ledger) - set(bare.ledger) if entry.name != "allocator slack"}
    assert more == {(name, place, num_bytes)}


def test_what_the_allocator_may_waste_grows_with_what_is_asked_of_it() -> None:
    """Case 14 reserved 199 MiB beside the 3.23 GiB that it asked an H200 for."""
    for made, least in ((plan(C14, card(), FAST), 160 * MIB), (plan(C14, card(2.0), FAST), 128 * MIB)):
        (slack,) = (entry.num_bytes for entry in made.ledger if entry.name == "allocator slack")
        assert slack == max(128 * MIB, (made.allocator_bytes - slack) // 20) and slack >= least
    assert not [entry for entry in plan(small(), laptop(), PACKED).ledger if entry.name == "allocator slack"]


@pytest.mark.parametrize(("cores", "blocks"), [(1, 1), (16, 16), (200, 100_000 / 4096)])
def test_blocks_drawn_ahead_are_counted_where_rows_are_cut_and_no_more_than_a_row(cores: int, blocks: float) -> None:
    machine = replace(card(), cores=cores)
    for flow, wanted in (("whole", set()), ("chunked", {("blocks drawn ahead", "host", blocks * 4096 * 1024 * 4)})):
        bare, drawn = (plan(C14, machine, FAST, Keeping(drawn_input=is_so), flow=flow) for is_so in (False, True))  # type: ignore[arg-type]
        assert set(drawn.ledger) - set(bare.ledger) == wanted and set(bare.ledger) <= set(drawn.ledger)


def test_a_laptop_counts_the_card_as_host_memory_and_has_no_context() -> None:
    made = plan(small(), laptop(), PACKED)
    assert "CUDA context" not in {entry.name for entry in made.ledger}
    assert host_total_bytes(made) == sum(made.held_bytes(place) for place in ("card", "pinned", "host"))
    assert made.allocator_bytes == made.held_bytes("card")


@pytest.mark.parametrize(("device_gib", "depth"), [(139.0, 3), (12.0, 3), (6.0, 3), (4.25, 3), (3.5, 2), (2.75, 1)])
def test_a_smaller_card_gets_a_shallower_ring(device_gib: float, depth: int) -> None:
    made = plan(C14, card(device_gib), FAST)
    assert (made.ring_depth, made.slice_rows) == (depth, 1)
    assert within_budgets(made)


def test_a_card_of_2_gib_is_refused_with_both_values_and_the_sum() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(C14, card(2.0), FAST, flow="whole")
    assert_refusal_adds_up(caught.value, "2.00 GiB", "on the card")
    assert "1 row of case 14 at depth 1 need" in str(caught.value)
    assert (
        caught.value.hint == "raise --device-budget, shorten --seq-len, or name a recipe with a fused attention kernel"
    )
    assert caught.value.exit_code == 3


def assert_refusal_adds_up(error: DoesNotFit, budget: str, where: str) -> None:
    """The text has what is needed, where, the budget, and parts whose sum is what is needed."""
    found = re.search(rf"need ([\d,.]+ \w+) {where}, the budget is ([\d,.]+ \w+) \((.*)\)$", str(error))
    assert found, str(error)
    assert found[2] == budget
    sizes = re.findall(r"([\d,.]+ (?:[KMGT]iB|B))(?: \+ |$)", found[3])
    total = sum(parse_bytes(size.replace(",", "")) for size in sizes)
    needed = parse_bytes(found[1].replace(",", ""))
    assert abs(total - needed) <= 0.02 * needed, f"{show_bytes(total)} are listed: {error}"
    assert error.hint


@pytest.mark.parametrize(
    ("machine", "keeping", "disk", "where", "remedy"),
    [
        (card(pinned_gib=0.5), Keeping(), None, "pinned", "--pinned-budget"),
        (card(host_gib=2.0, pinned_gib=1.0), Keeping(), None, "in host memory", "--host-budget"),
        (card(host_gib=10.0), Keeping(output="memory"), None, "in host memory", "--output none"),
        (card(), Keeping(output="file"), 4 * GIB, "on disk", "free some space"),
        (laptop(2.9), Keeping(), None, "in host memory", "--host-budget"),
        (laptop(1.0), Keeping(), None, "in host memory", "--host-budget"),
    ],
)
def test_each_place_that_overruns_is_named_with_its_sum_and_remedy(
    machine: Machine, keeping: Keeping, disk: int | None, where: str, remedy: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(C14, machine, FAST, keeping, free_disk_bytes=disk, flow="whole")
    limits = {"pinned": machine.pinned_budget_bytes, "on disk": disk, "on the card": machine.device_budget_bytes}
    assert_refusal_adds_up(caught.value, show_bytes(limits.get(where, machine.host_budget_bytes) or 0), where)
    assert remedy in str(caught.value.hint)


def test_a_refusal_whose_parts_do_not_add_up_would_be_seen() -> None:
    text = "1 row of case 14 at depth 1 need 3.00 GiB on the card, the budget is 2.00 GiB (a 1.00 GiB + b 1.00 GiB)"
    with pytest.raises(AssertionError, match=r"2\.00 GiB are listed"):
        assert_refusal_adds_up(DoesNotFit(text, "hint"), "2.00 GiB", "on the card")


def test_no_call_of_a_kernel_reaches_2_to_the_31_elements() -> None:
    assert most_rows_per_call(C14) == 6
    assert 6 * 3 * C14.seq_len * C14.d_model <= MOST_ELEMENTS < 7 * 3 * C14.seq_len * C14.d_model
    roomy = card(10_000, 10_000, 20_000)
    for asked in (None, 6, 1):
        assert plan(C14, roomy, FAST, slice_rows=asked).slice_rows <= 6
    wide = plan(small(batch_size=10**7, seq_len=1), roomy, FAST)
    assert 3 * wide.slice_rows * wide.case.d_model <= MOST_ELEMENTS


def test_more_rows_a_slice_than_a_kernel_takes_are_refused_and_not_cut_in_silence() -> None:
    with pytest.raises(FrontierError, match="7 rows"):
        plan(C14, card(10_000, 10_000, 20_000), FAST, slice_rows=7)


def test_a_row_past_2_to_the_31_elements_is_refused_with_both_numbers() -> None:
    with pytest.raises(
        Unsupported, match=r"has 3,072,000,000 elements of q, k and v in .*; kernels address 2,147,483,647"
    ) as e:
        plan(C14.override(seq_len=1_000_000), card(), FAST, flow="whole")
    assert str(e.value.hint).startswith("leave out --flow whole") and e.value.exit_code == 3
    longest = MOST_ELEMENTS // (3 * 1024)
    assert plan(C14.override(seq_len=longest), card(), FAST).slice_rows == 1


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_depth_that_is_asked_for_is_kept(depth: int) -> None:
    assert plan(C14, card(), FAST, ring_depth=depth).ring_depth == depth
    with pytest.raises(DoesNotFit, match=f"at depth {depth} need"):
        plan(C14, card(1.0), FAST, ring_depth=depth, flow="whole")


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_a_slice_size_that_is_asked_for_is_kept_up_to_the_batch(rows: int) -> None:
    assert plan(small(), card(), FAST, slice_rows=rows).slice_rows == min(rows, 8)


sizes = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 20_000), "seq_len": st.integers(1, 200_000), "heads": st.sampled_from([1, 4, 16]),
        "d_model": st.sampled_from([16, 128, 1024, 4096]), "ffn_dim": st.integers(1, 8192),
        "layers": st.integers(1, 8),
    }
)  # fmt: skip
_parts = {part: st.sampled_from(words) for part, words in WORDS.items() if part != "fusion"}
_stacks = st.builds(Recipe, precision=_parts["precision"], fusion=st.just("stack"))  # type: ignore[arg-type]
recipes = st.builds(Recipe, **_parts) | _stacks  # type: ignore[arg-type]
gib = st.floats(0.3, 200)
machines = st.one_of(st.builds(card, gib, gib, gib), st.builds(laptop, gib))
keepings = st.builds(
    Keeping, resident_input=st.booleans(), output=st.sampled_from(["file", "memory", "none"]),
    watch=st.sampled_from([(), (0,)]), masked=st.booleans(),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes, machines, recipes, keepings, st.none() | st.integers(1, 6), st.none() | st.integers(1, 9))
def test_no_plan_ever_exceeds_a_budget(sizes, machine, recipe, keeping, depth, rows) -> None:  # type: ignore[no-untyped-def]
    case = small(**sizes)
    try:
        made = plan(case, machine, recipe, keeping, ring_depth=depth, slice_rows=rows, free_disk_bytes=50 * GIB)
    except (DoesNotFit, Unsupported) as refusal:
        assert refusal.hint
        return
    assert within_budgets(made, 50 * GIB)
    assert 1 <= made.slice_rows <= case.batch_size and made.ring_depth >= 1
    assert 3 * made.slice_rows * min(case.seq_len, made.chunk or case.seq_len) * case.d_model < 1 << 31
    assert (made.num_slices - 1) * made.slice_rows < case.batch_size <= made.num_slices * made.slice_rows


def test_a_plan_over_its_budget_would_be_seen() -> None:
    made = plan(C14, card(), FAST)
    tight = Plan(**{name: getattr(made, name) for name in Plan.__slots__} | {"machine": card(3.0)})
    assert within_budgets(made) and not within_budgets(tight)


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys; from frontier.planner import plan; from frontier.case import Case; "
        "from frontier.machine import Machine; from frontier.recipe import REFERENCE; "
        "m = Machine.detect('cpu'); {}"
        "plan(Case.load('2'), m, REFERENCE); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program.format("")]).returncode == 0
    assert subprocess.run([sys.executable, "-c", program.format("import torch; ")]).returncode == 1
