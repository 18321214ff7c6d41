"""Which flow a plan takes by itself, what it says of it, and that the bytes of chunks fit every budget."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import a_record, card, laptop, small
from test_planner import C14, FAST, PACKED, within_budgets

from frontier.errors import DoesNotFit, Unsupported
from frontier.estimate import estimate
from frontier.layers.costs import MOST_ELEMENTS, MOST_POSITIONS, chunk_refusal, most_positions_per_call
from frontier.planner import Keeping, plan
from frontier.recipe import REFERENCE, parse_recipe
from frontier.units import GIB

MILLION = C14.override(batch_size=1, seq_len=1 << 20)


def test_whole_rows_are_taken_where_they_fit_and_chunks_where_they_do_not() -> None:
    whole, cut = plan(C14, card(), FAST), plan(C14, card(2.0), FAST)
    assert (whole.flow, whole.chunk, whole.spool, whole.why) == ("whole", None, None, "whole rows fit")
    assert cut.flow == "chunked" and "need" in cut.why and "on the card, the budget is 2.00 GiB" in cut.why
    assert within_budgets(cut)
    assert {"flow": "chunked", "chunk": cut.chunk, "spool": cut.spool, "why": cut.why}.items() <= cut.as_dict().items()


def test_a_row_too_long_for_one_call_is_cut_however_large_the_card() -> None:
    made = plan(MILLION, card(), FAST)
    assert made.flow == "chunked" and "kernels address" in made.why and made.spool == "card"
    narrow = small(batch_size=1, seq_len=MOST_POSITIONS + 1, d_model=16)
    assert plan(narrow, card(), FAST).flow == "chunked"
    assert plan(small(batch_size=1, seq_len=MOST_POSITIONS, d_model=16), card(), FAST).flow == "whole"


def test_the_spool_moves_from_the_card_to_the_host_to_a_file_as_budgets_shrink() -> None:
    spools = [
        plan(MILLION, card(device_gib, 8, host_gib), FAST, spool_disk_bytes=disk).spool
        for device_gib, host_gib, disk in ((139, 120, None), (4, 120, None), (4, 9, 40 * GIB))
    ]
    assert spools == ["card", "host", "disk"]
    with pytest.raises(DoesNotFit, match="in host memory"):
        plan(MILLION, card(4, 8, 9), FAST, spool_disk_bytes=7 * GIB)


def test_issue_budgets_hold_with_chunks_whose_keys_come_in_time() -> None:
    four_million = C14.override(batch_size=1, seq_len=1 << 22, layers=1)
    for case, device_gib in ((MILLION, 4.0), (four_million, 12.0), (C14, 2.0)):
        made = plan(case, card(device_gib), FAST)
        assert within_budgets(made) and made.chunk is not None and made.ring_depth >= 2
        assert made.chunk >= (8_192 if made.spool == "card" else 16_384)
    assert made.spool == "pinned", "keys of a row of case 14 fit 2 GiB only beside chunks that are too short"


def test_what_is_asked_for_is_kept_or_refused_by_name() -> None:
    made = plan(C14, card(), FAST, flow="chunked")
    assert made.flow == "chunked" and made.why == "asked for"
    made = plan(C14, card(), FAST, chunk=1_000, ring_depth=2)
    assert (made.chunk, made.ring_depth, made.num_chunks) == (1_000, 2, 100)
    with pytest.raises(Unsupported, match="whole rows have no chunk of 5"):
        plan(C14, card(), FAST, flow="whole", chunk=5)
    most = most_positions_per_call(MILLION)
    with pytest.raises(Unsupported, match=f"{most:,} at most") as refused:
        plan(MILLION, card(), FAST, chunk=most + 1)
    assert str(most) in str(refused.value.hint)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("fp16/packed/short", "short tells no log-sum-exp"),
        ("fp16/packed/scores", "scores tells no log-sum-exp"),
        ("fp16/packed/cudnn/graph", "graph serves whole rows of one shape"),
        ("fp16/packed/cudnn/held-small", "held-small judges whole rows"),
        ("fp16/stack", "stack fuses what lies around attention"),
    ],
)
def test_a_recipe_that_cannot_cut_rows_says_why(recipe: str, reason: str) -> None:
    parsed = parse_recipe(recipe, REFERENCE)
    assert reason in str(chunk_refusal(parsed))
    with pytest.raises(Unsupported, match=reason):
        plan(C14, card(), parsed, flow="chunked")
    if parsed.fusion != "stack":  # what fits no card whole says that chunks would be no way out
        with pytest.raises((DoesNotFit, Unsupported)) as refused:
            plan(C14, card(1.0), parsed)
        assert "need" in str(refused.value) and reason in str(refused.value.hint)


@given(
    st.integers(1, 3_000_000), st.sampled_from([16, 1024, 4096]), st.booleans(), st.floats(0.5, 100),
    st.floats(1, 100), st.none() | st.integers(1, 2_000_000), st.booleans(), st.sampled_from([FAST, PACKED, REFERENCE]),
)  # fmt: skip
def test_no_chunked_plan_exceeds_a_budget_or_a_kernel(
    seq_len, width, causal, gib, host_gib, chunk, masked, recipe
) -> None:  # type: ignore[no-untyped-def]
    case = small(batch_size=2, seq_len=seq_len, d_model=width, causal=causal)
    for machine in (card(gib, host_gib / 2, host_gib), laptop(host_gib)):
        try:
            made = plan(case, machine, recipe, Keeping(masked=masked), flow="chunked", chunk=chunk)
        except (DoesNotFit, Unsupported) as refusal:
            assert refusal.hint
            continue
        assert within_budgets(made) and made.chunk is not None and (chunk is None or made.chunk == chunk)
        positions = min(made.chunk, seq_len)
        assert 3 * positions * width <= MOST_ELEMENTS and positions <= MOST_POSITIONS
        kept = {e.name: e for e in made.ledger}["keys and values of a row"]
        layers = case.layers if causal else 1
        rest = 0 if causal else case.row_bytes
        assert kept == (kept.name, made.spool, layers * seq_len * 2 * width * recipe.working_bytes + rest)


def test_the_time_to_expect_counts_what_keys_take_on_the_link() -> None:
    records = [a_record(C14, str(FAST), 3.0, card_s=(3.0,))]
    on_card, on_host = (plan(MILLION, card(gib), FAST) for gib in (139.0, 4.0))
    assert (on_card.spool, on_host.spool) == ("card", "host")
    guesses = [estimate(made, records, on_the_fly=False) for made in (on_card, on_host)]
    assert guesses[0].bound_by == "compute" and guesses[1].pass_s >= guesses[0].pass_s
    # 1,024 chunks meet 1,047,552 times in two layers: 4 MiB of keys and values each, 4.4 TB.
    short = plan(MILLION, card(4.0), FAST, chunk=1_024)
    guess = estimate(short, records, on_the_fly=False)
    assert short.spool == "pinned" and guess.bound_by == "link" and 300 < guess.pass_s < 500
    assert estimate(plan(MILLION, card(139.0), FAST, chunk=1_024), records, on_the_fly=False).pass_s < 200


def test_the_best_way_that_fits_is_taken() -> None:
    ways = [(2.6, 16_768, "card", 3), (2.2, 8_448, "card", 3), (2.0, 20_096, "pinned", 3)]
    ways += [(1.82, 16_768, "pinned", 3), (1.7, 16_768, "pinned", 2), (1.3, 5_632, "pinned", 3)]
    # Less room: short chunks, keys from pinned memory, a shallower ring, at last chunks whose keys come too late.
    for gib, *way in ways:
        made = plan(C14, card(gib), FAST)
        assert [made.chunk, made.spool, made.ring_depth] == way, gib
    assert plan(C14, dataclasses.replace(card(1.82), pinned_budget_bytes=GIB), FAST).spool == "host"
    # Long chunks hide a copy within the host: their keys need not be pinned. In less room short ones come, and pins.
    ways = [(8.0, 65_536, "host"), (3.0, 41_984, "host"), (2.0, 18_176, "pinned")]
    assert [(gib, made.chunk, made.spool) for gib, *_ in ways for made in [plan(MILLION, card(gib), FAST)]] == ways
    with pytest.raises(Unsupported, match="pinned memory is for copies to a card"):
        plan(C14, laptop(), parse_recipe("fp32/packed/flash", REFERENCE), spool="pinned")
    assert [plan(C14, card(2.2), FAST, ring_depth=depth, flow="chunked").ring_depth for depth in (1, 2)] == [1, 2]
