"""Who passed may serve, a tie changes nothing, and evidence of another shape must leave room for a larger error."""

import math

import pytest
from paper import a_tuned, small

from frontier.record import Record
from frontier.tuned import expected_budget, lead, of_call, of_kin, ranking, standing

CASE = small()


def ranked(*records: Record) -> list[str]:
    return [record.recipe for record in ranking(records)]


def test_the_fastest_of_those_that_passed_the_whole_program_comes_first() -> None:
    assert ranked(a_tuned(CASE, "a", 2.0), a_tuned(CASE, "b", 1.0), a_tuned(CASE, "c", 3.0)) == ["b", "a", "c"]


@pytest.mark.parametrize(
    "spoilt",
    [
        a_tuned(CASE, "a", 0.1, outcome="fail"),
        a_tuned(CASE, "a", 0.1, promotable=False),
        a_tuned(CASE, "a", 0.1, stage="screen", promotable=False),
        a_tuned(CASE, "a", outcome="refused", promotable=False, call_ms={}, refused="no card"),
        a_tuned(CASE, "a", outcome="out of memory", promotable=False, call_ms={}, refused="out of memory"),
    ],
    ids=["failed", "not promotable", "only screened", "refused", "out of memory"],
)
def test_what_did_not_pass_all_is_never_ranked_however_fast(spoilt: Record) -> None:
    assert ranked(spoilt, a_tuned(CASE, "b", 5.0)) == ["b"]
    assert ranked(a_tuned(CASE, "a", 0.1), a_tuned(CASE, "b", 5.0)) == ["a", "b"], "the same, passing, would be first"


@pytest.mark.parametrize(("ms", "first"), [(0.99, "old"), (0.981, "old"), (0.979, "new"), (1.5, "old")])
def test_an_incumbent_gives_way_only_to_what_is_faster_by_more_than_the_noise(ms: float, first: str) -> None:
    assert ranked(a_tuned(CASE, "old", 1.0, noise=0.02), a_tuned(CASE, "new", ms, noise=0.01))[0] == first
    assert ranked(a_tuned(CASE, "old", 1.0, noise=0.01), a_tuned(CASE, "new", ms, noise=0.02))[0] == first


def test_a_newcomer_is_compared_with_the_incumbents_time_from_its_own_run() -> None:
    old = a_tuned(CASE, "old", 1.0)
    slow_day = a_tuned(CASE, "new", 1.1, beside={"old": 1.4})
    assert lead(slow_day, old) == pytest.approx(1 - 1.1 / 1.4) and ranked(old, slow_day) == ["new", "old"]
    fast_day = a_tuned(CASE, "new", 0.8, beside={"old": 0.7})
    assert ranked(old, fast_day) == ["old", "new"]


def test_the_last_record_of_a_recipe_decides_but_a_screening_that_passes_does_not() -> None:
    whole, screened = a_tuned(CASE, "a", 1.0), a_tuned(CASE, "a", 2.0, stage="screen", promotable=False)
    failed = a_tuned(CASE, "a", 2.0, stage="screen", outcome="fail", promotable=False)
    assert standing([screened, whole]) == [whole] == standing([whole, screened])
    assert standing([whole, failed]) == [failed]
    assert standing([screened, a_tuned(CASE, "b"), failed])[-1] == failed
    newer = a_tuned(CASE, "a", 3.0, stage="screen", promotable=False)
    assert standing([screened, newer]) == [newer]


@pytest.mark.parametrize(
    ("changes", "call", "kin"),
    [
        ({"name": "x", "seed": 3}, True, True),
        ({"batch_size": 9}, False, True),
        ({"seq_len": 64}, False, True),
        ({"heads": 8}, False, False),
        ({"layers": 5}, False, False),
        ({"causal": False}, False, False),
        ({"atol": 1e-5}, False, False),
    ],
)
def test_what_is_the_same_call_and_what_is_kin(changes: dict, call: bool, kin: bool) -> None:
    records = [a_tuned(small(**changes), "a")]
    assert (bool(of_call(records, CASE)), bool(of_kin(records, CASE))) == (call, kin)


def test_more_elements_are_expected_to_err_more_and_fewer_not_less() -> None:
    record = a_tuned(small(batch_size=64), "a", budget=0.5)
    seen, ahead = 64 * 128 * 128 * 50, 10_000 * 128 * 128 * 5
    assert expected_budget(record, small(batch_size=10_000)) == pytest.approx(
        0.5 * math.sqrt(math.log(ahead) / math.log(seen))
    )
    assert expected_budget(record, small(batch_size=1)) == 0.5
    assert expected_budget(a_tuned(CASE, "a", verdicts={}), CASE) == math.inf
