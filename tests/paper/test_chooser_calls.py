"""For calls on rows that lie on the device, tuned records speak first: of this shape, the nearest, other cards."""

import dataclasses
import math
from typing import Any

import pytest
from paper import H200_NAME, a_record, a_tuned, card, laptop, small

from frontier.chooser import UNTRIED, Choice, choose, choose_on_paper
from frontier.errors import Unsupported
from frontier.layers import program
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.record import Record

CASE = small(name="mine", batch_size=64)
STACK, GRAPH, EAGER = "fp16/stack", "fp16/packed/short/graph", "fp16/packed/flash"


@pytest.fixture(autouse=True)
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Recipes that refuse here; none, unless a test names some."""
    words: set[str] = set()

    def rule(case: Any, recipe: Recipe, machine: Any) -> str | None:
        return "it will not" if str(recipe) in words else None

    monkeypatch.setattr(program, "refusal", rule)
    return words


def chosen(*records: Record, case: Any = CASE, **options: Any) -> Choice:
    options = {"passes": math.inf, "try_kernels": False, **options}
    return choose(case, card(), records=list(records), **options)


def test_the_fastest_tuned_recipe_of_this_shape_is_chosen_and_the_sentence_says_so() -> None:
    choice = chosen(a_tuned(CASE, EAGER, 0.3), a_tuned(CASE, STACK, 0.04, budget=0.61), a_tuned(CASE, GRAPH, 0.2))
    assert str(choice.recipe) == STACK and choice.passed_over == ()
    assert choice.why == (
        "fastest tuned on this card for this shape: case mine (batch 64, length 128), NVIDIA H200, "
        "0.04 ms a call, 0.61 of the error budget"
    )


def test_starts_do_not_count_in_calls_and_count_in_passes() -> None:
    """A whole-stack kernel takes seconds to compile and saves microseconds a call: a single pass is not for it."""
    records = [a_tuned(CASE, STACK, 0.04, first_result_s=9.0), a_tuned(CASE, EAGER, 0.3, first_result_s=0.1)]
    assert str(chosen(*records).recipe) == STACK
    assert str(chosen(*records, passes=1).recipe) == EAGER


def test_a_stream_is_given_a_graph_but_nothing_that_is_compiled_for_each_length() -> None:
    compiled = "fp16/packed/cudnn/compile"
    records = [a_tuned(CASE, compiled, 0.1, first_result_s=0.0), a_tuned(CASE, GRAPH, 3.0, first_result_s=0.0)]
    assert str(chosen(*records, passes=1000).recipe) == GRAPH
    assert str(chosen(*records).recipe) == compiled


def test_runs_speak_first_for_passes_and_tuned_calls_for_calls() -> None:
    records = [a_record(CASE, "fp16/packed/cudnn", 2.0), a_tuned(CASE, EAGER, 0.3)]
    assert str(chosen(*records).recipe) == EAGER
    assert str(chosen(*records, passes=1).recipe) == "fp16/packed/cudnn"
    assert str(chosen(records[0]).recipe) == "fp16/packed/cudnn"


def test_what_a_gate_said_of_tuned_calls_is_no_verdict_on_a_stream() -> None:
    timed = a_record(CASE, "fp16/packed/cudnn", verdicts={})
    assert str(chosen(timed, a_tuned(CASE, "fp16/packed/cudnn"), passes=1).recipe) == "fp16/packed/cudnn"
    proxy = a_record(CASE, "fp16/packed/cudnn", None, kind="proxy")
    failing = a_tuned(CASE, "fp16/packed/cudnn", outcome="fail", promotable=False)
    assert "2.0" not in chosen(timed, proxy, failing, passes=1).why
    assert str(chosen(timed, proxy, failing, passes=1).recipe) == "fp16/packed/cudnn"


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"outcome": "fail", "promotable": False}, "on this very shape: "),
        ({"promotable": False}, "on this very shape: "),
        (
            {"outcome": "out of memory", "promotable": False, "refused": "it needs 9 GiB"},
            "on this very shape: it needs",
        ),
    ],
)
def test_what_was_denied_to_this_very_shape_is_not_lent_by_a_near_one(own: dict[str, Any], reason: str) -> None:
    near = dataclasses.replace(CASE, batch_size=CASE.batch_size * 2, name="near")
    lent = [a_tuned(near, STACK, 0.05), a_tuned(near, EAGER, 0.4)]
    assert str(chosen(*lent).recipe) == STACK
    choice = chosen(*lent, a_tuned(CASE, STACK, 0.04, **own))
    assert str(choice.recipe) == EAGER and any(reason in text for text in choice.passed_over)


def test_of_other_shapes_the_nearest_is_taken_and_said_so() -> None:
    records = [
        a_tuned(small(name="far", batch_size=1, seq_len=128), GRAPH, 0.01),
        a_tuned(small(name="near", batch_size=128), STACK, 0.08),
        a_tuned(small(name="long", batch_size=64, seq_len=1024), EAGER, 0.5),
    ]
    choice = chosen(*records)
    assert str(choice.recipe) == STACK
    assert choice.why.startswith("this shape was not tuned; the nearest on this card: case near (batch 128,")


def test_evidence_of_a_small_batch_admits_a_large_one_only_where_it_leaves_room() -> None:
    large = small(name="6", batch_size=10_000)
    roomy, tight = (a_tuned(small(name="1", batch_size=64), STACK, 0.05, budget=budget) for budget in (0.5, 0.79))
    assert str(chosen(roomy, case=large).recipe) == STACK
    choice = chosen(tight, case=large)
    assert str(choice.recipe) == UNTRIED[True]
    assert choice.passed_over == (f"{STACK}: passed case 1; here its error would take 0.85 of the budget",)
    by_part = a_tuned(small(name="1", batch_size=64), GRAPH, 0.05, budget=0.79)
    assert str(chosen(by_part, case=large).recipe) == UNTRIED[True], "nor the same precision by another kernel"


@pytest.mark.parametrize("changes", [{"d_model": 256}, {"heads": 8}, {"layers": 5}, {"atol": 1e-6}])
def test_another_width_depth_or_rule_is_never_near(changes: dict) -> None:
    assert str(chosen(a_tuned(small(**changes), STACK)).recipe) == UNTRIED[True]


def test_what_refuses_here_is_passed_over_and_named(refused: set[str]) -> None:
    refused.add(STACK)
    choice = chosen(a_tuned(CASE, STACK, 0.1), a_tuned(CASE, GRAPH, 0.2))
    assert str(choice.recipe) == GRAPH and choice.passed_over == (f"{STACK}: it will not",)


def test_out_of_memory_steps_down_to_the_next_that_is_known_to_hold_less() -> None:
    records = [
        a_tuned(CASE, STACK, 0.1, device_peak_bytes=8 << 30),
        a_tuned(CASE, GRAPH, 0.2, device_peak_bytes=9 << 30),
        a_tuned(CASE, EAGER, 0.3, device_peak_bytes=2 << 30),
    ]
    choice = chosen(*records, out_of_memory=[parse_recipe(STACK, REFERENCE)])
    assert str(choice.recipe) == EAGER
    assert choice.passed_over == (f"{STACK}: out of memory", f"{GRAPH}: it holds 9.00 GiB, and 8.00 GiB were too much")
    assert str(chosen(*records).recipe) == STACK


def test_a_tuned_record_of_another_card_serves_after_this_cards_nearest() -> None:
    elsewhere = a_tuned(CASE, STACK, 0.1, machine="NVIDIA B200")
    choice = chosen(elsewhere)
    assert str(choice.recipe) == STACK and choice.why.startswith("not tuned on this card; passed elsewhere")
    assert str(chosen(elsewhere, a_tuned(small(batch_size=32), GRAPH)).recipe) == GRAPH
    assert str(choose(CASE, laptop(), records=[elsewhere], passes=math.inf).recipe) == UNTRIED[False]


def test_the_table_of_a_card_that_is_not_here_comes_from_records_alone(refused: set[str]) -> None:
    refused |= {STACK, GRAPH}
    records = [a_tuned(CASE, STACK, 0.1, versions={"driver": "580"}), a_tuned(CASE, GRAPH, 0.2)]
    assert str(choose_on_paper(CASE, H200_NAME, records).recipe) == STACK
    assert str(choose_on_paper(small(d_model=64), H200_NAME, records).recipe) == UNTRIED[True]
    with pytest.raises(Unsupported, match="no record of `Tesla T4`") as caught:
        choose_on_paper(CASE, "Tesla T4", records)
    assert H200_NAME in str(caught.value.hint)
