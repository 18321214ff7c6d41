"""The recipe comes from evidence: the fastest that passed and serves here, and the sentence says why."""

import math
from collections.abc import Callable

import pytest
from paper import a_record, a_tuned, card, laptop, small

import frontier.fused_canary as fused_module
import frontier.layers.canary as canary_module
from frontier.case import Case
from frontier.chooser import UNTRIED, choose
from frontier.errors import CaseError, Unsupported
from frontier.recipe import REFERENCE, Recipe

CASE = small(name="mine")
FAIL = {"gate": {"verdict": "fail"}}
Refuse = Callable[..., None]


@pytest.fixture(autouse=True)
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Kernels all serve, but for the attention words that a test names."""

    def these(*words: str) -> None:
        def why_not(case: Case, recipe: object, machine: object, chunk: int | None) -> str | None:
            return "wrong numbers" if recipe.attention in words else None  # type: ignore[attr-defined]

        monkeypatch.setattr(canary_module, "why_not", why_not)

    these()
    return these


def test_the_fastest_passing_record_of_this_case_here_is_chosen_and_the_sentence_says_so() -> None:
    records = [
        a_record(CASE, "fp16/packed/flash", 2.0),
        a_record(CASE, "fp16/packed/cudnn", 1.5),
        a_record(CASE, "fp32", 9.0),
    ]
    choice = choose(CASE, card(), records=records)
    assert str(choice.recipe) == "fp16/packed/cudnn" and choice.passed_over == ()
    assert choice.why == (
        "fastest passing record of this case on this card for 1 pass, start included: "
        "case mine, NVIDIA H200, 1.5 s a pass"
    )


@pytest.mark.parametrize(("passes", "chosen"), [(1, "cudnn"), (32, "cudnn"), (33, "fa4"), (100, "fa4")])
def test_a_slow_start_is_worth_it_only_for_enough_passes(passes: int, chosen: str) -> None:
    """FA4 gains 0.4 s a pass and loses 13 s at its start: 13 / 0.4 = 32.5."""
    records = [
        a_record(CASE, "fp16/packed/fa4", 2.0, startup_s=15.0),
        a_record(CASE, "fp16/packed/cudnn", 2.4, startup_s=2.0),
    ]
    choice = choose(CASE, card(), records=records, passes=passes)
    assert choice.recipe.attention == chosen
    assert f"for {passes} pass{'es' if passes > 1 else ''}, start included" in choice.why


@pytest.mark.parametrize(
    "spoilt",
    [
        a_record(CASE, "bf16/packed/fa4", 0.1, verdicts=FAIL),
        a_record(CASE, "bf16/packed/fa4", 0.1, verdicts={}),
        a_record(CASE, "bf16/packed/fa4", None, refused="needs 9.0"),
        a_record(CASE, "bf16/packed/fa4", None, refused="needs 9.0", verdicts={}),
        a_record(CASE, "bf16/packed/fa4", 0.1, verdicts={"gate": {"verdict": "pass"}, "referee": {"verdict": "fail"}}),
    ],
    ids=["failing", "unjudged", "refused", "refused and unjudged", "failed by one judge"],
)
def test_a_failing_or_refused_record_is_never_chosen_however_fast(spoilt) -> None:  # type: ignore[no-untyped-def]
    good = a_record(CASE, "fp16/packed/cudnn", 5.0)
    assert str(choose(CASE, card(), records=[spoilt, good]).recipe) == "fp16/packed/cudnn"
    assert str(choose(CASE, card(), records=[spoilt]).recipe) == UNTRIED[True]


def test_the_same_record_passing_would_be_chosen() -> None:
    records = [a_record(CASE, "bf16/packed/fa4", 0.1), a_record(CASE, "fp16/packed/cudnn", 5.0)]
    assert str(choose(CASE, card(), records=records).recipe) == "bf16/packed/fa4"


@pytest.mark.parametrize("changes", [{"seed": 9}, {"name": "other"}, {"input_scale": 2.0}])
def test_seed_and_name_make_no_other_problem(changes: dict) -> None:
    records = [a_record(small(**changes), "fp16/packed/flash", 1.0)]
    assert choose(CASE, card(), records=records).why.startswith("fastest passing record of this case on this card")


@pytest.mark.parametrize("changes", [{"layers": 2}, {"ffn_dim": 64}, {"causal": False}])
def test_another_depth_or_mask_is_another_problem_but_near(changes: dict) -> None:
    records = [a_record(small(**changes), "fp16/packed/flash", 1.0)]
    assert choose(CASE, card(), records=records).why.startswith("no record of this case; the nearest on this card")


def test_seconds_of_a_small_batch_do_not_beat_the_record_of_this_batch() -> None:
    """Cases 1 to 6 differ in their batch alone: seconds of one row say nothing against those of ten thousand."""
    case = small(batch_size=10_000)
    records = [
        a_record(small(batch_size=1), "fp32/separate/dense", 0.001),
        a_record(case, "fp16/packed/cudnn", 3.0),
        a_record(case, "fp32/separate/dense", 30.0),
    ]
    assert str(choose(case, card(), records=records).recipe) == "fp16/packed/cudnn"


def test_of_other_lengths_the_nearest_by_ratio_is_taken() -> None:
    records = [
        a_record(small(seq_len=16), "fp32/packed/flash", 0.1),
        a_record(small(seq_len=512), "fp16/packed/flash", 4.0),
        a_record(small(seq_len=512), "fp16/packed/cudnn", 3.0),
        a_record(small(seq_len=100_000), "bf16/packed/fa4", 0.2),
    ]
    choice = choose(CASE, card(), records=records)
    assert str(choice.recipe) == "fp16/packed/cudnn"
    assert choice.why == "no record of this case; the nearest on this card: case small, NVIDIA H200, 3 s a pass"


@pytest.mark.parametrize("changes", [{"d_model": 256}, {"heads": 8}])
def test_another_width_or_number_of_heads_is_never_near(changes: dict) -> None:
    records = [a_record(small(**changes), "fp16/packed/cudnn", 1.0)]
    choice = choose(CASE, card(), records=records)
    assert str(choice.recipe) == UNTRIED[True] and choice.why == "no record is near: float32 with a fused kernel"


def test_another_cards_record_serves_after_this_cards_nearest() -> None:
    elsewhere = a_record(CASE, "fp16/packed/fa4", 0.5, machine="NVIDIA B200")
    choice = choose(CASE, card(), records=[elsewhere])
    assert str(choice.recipe) == "fp16/packed/fa4"
    assert choice.why == "no record of this card; passed elsewhere: case mine, NVIDIA B200, 0.5 s a pass"
    near = a_record(small(seq_len=64), "fp16/packed/cudnn", 2.0)
    assert str(choose(CASE, card(), records=[elsewhere, near]).recipe) == "fp16/packed/cudnn"


def test_a_cards_record_says_nothing_for_a_cpu() -> None:
    assert str(choose(CASE, laptop(), records=[a_record(CASE, "fp16/packed/cudnn", 1.0)]).recipe) == UNTRIED[False]


def test_what_the_canary_refuses_is_passed_over_and_named(refuse: Refuse) -> None:
    refuse("cudnn")
    records = [a_record(CASE, "fp16/packed/cudnn", 1.0), a_record(CASE, "fp16/packed/flash", 2.0)]
    choice = choose(CASE, card(), records=records)
    assert str(choice.recipe) == "fp16/packed/flash"
    assert choice.passed_over == ("fp16/packed/cudnn: wrong numbers",)


def test_a_fused_stack_that_other_cards_vouch_for_meets_a_canary_here(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def refusing(case: Case, recipe: Recipe, machine: object) -> str | None:
        seen.append(str(recipe))
        return "wrong numbers: 3 of 9 elements fail" if recipe.is_one_kernel else None

    monkeypatch.setattr(fused_module, "fused_canary", refusing)
    of_others = [a_tuned(CASE, "fp16/stack/held-small", machine="NVIDIA A100")]
    choice = choose(CASE, card(), records=of_others, passes=math.inf)
    assert seen[0] == "fp16/stack/held-small" and str(choice.recipe) == UNTRIED[True]
    assert choice.passed_over == ("fp16/stack/held-small: wrong numbers: 3 of 9 elements fail",)
    with pytest.raises(Unsupported, match="wrong numbers: 3 of 9 elements fail"):  # nor where it is asked for
        choose(CASE, card(), "fp16/stack/held-small", of_others, passes=math.inf)
    seen.clear()
    own = [a_tuned(CASE, "fp16/stack/held-small", machine=card().name)]
    assert str(choose(CASE, card(), records=own, passes=math.inf).recipe) == "fp16/stack/held-small"
    assert str(choose(CASE, card(), "fp16/stack/held-small", own, passes=math.inf).recipe) == "fp16/stack/held-small"
    assert not seen  # this card's own evidence says it


def test_where_all_kernels_refuse_the_reference_serves_and_each_refusal_is_named(refuse: Refuse) -> None:
    refuse("cudnn", "flash", "efficient", "fa4")
    choice = choose(CASE, card(), records=[a_record(CASE, "fp16/packed/cudnn", 1.0)])
    assert choice.recipe == REFERENCE and choice.why == "nothing faster is admissible here"
    assert [text.split(":")[0] for text in choice.passed_over] == [
        "fp16/packed/cudnn",
        "fp16/packed/flash",
        "fp16/packed/efficient",
        UNTRIED[True],
    ]


def test_a_recipe_that_is_asked_for_is_taken_though_slower() -> None:
    records = [a_record(CASE, "fp16/packed/cudnn", 1.0)]
    choice = choose(CASE, card(), "fp32/separate/dense", records)
    assert choice.recipe == REFERENCE and choice.why == "asked for"
    assert str(choose(CASE, card(), "flash", records).recipe) == "fp16/packed/flash"


def test_a_recipe_that_is_asked_for_and_refuses_is_an_error_and_no_fallback(refuse: Refuse) -> None:
    refuse("fa4")
    with pytest.raises(Unsupported) as caught:
        choose(CASE, card(), "fp16/packed/fa4", [a_record(CASE, "fp16/packed/cudnn", 1.0)])
    assert str(caught.value) == "recipe fp16/packed/fa4 cannot serve case mine on NVIDIA H200: wrong numbers"
    assert "--recipe" in str(caught.value.hint) and caught.value.exit_code == 3


def test_a_recipe_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(CaseError, match="unknown word `fa5`"):
        choose(CASE, card(), "fa5", [])


def test_a_record_whose_recipe_this_version_does_not_know_is_no_obstacle() -> None:
    records = [a_record(CASE, "fp16/packed/fa9", 0.1), a_record(CASE, "fp16/packed/cudnn", 1.0)]
    assert str(choose(CASE, card(), records=records).recipe) == "fp16/packed/cudnn"


def test_an_older_card_takes_the_judged_precision_with_a_kernel_that_it_has() -> None:
    t4 = card(name="Tesla T4", capability=(7, 5))
    choice = choose(CASE, t4, records=[a_record(CASE, "fp16/packed/cudnn")], try_kernels=False)
    assert str(choice.recipe) == "fp16/packed/efficient"
    assert [text.split(":")[0] for text in choice.passed_over] == ["fp16/packed/cudnn", "fp16/packed/flash"]


def test_a_timed_run_is_admitted_by_a_verdict_given_elsewhere_and_lost_by_one_failure() -> None:
    timed, shorter = a_record(CASE, "fp16/packed/cudnn", verdicts={}), small(seq_len=64)
    passing, failing = (
        a_record(shorter, "fp16/packed/cudnn", None, kind="proxy", verdicts={"proxy": {"verdict": verdict}})
        for verdict in ("pass", "fail")
    )
    elsewhere = a_record(small(d_model=256), "fp16/packed/cudnn", None, verdicts={"proxy": {"verdict": "pass"}})
    given = ([timed], [timed, elsewhere], [timed, passing], [timed, passing, failing])
    chosen = [str(choose(CASE, card(), records=records).recipe) for records in given]
    assert chosen == [UNTRIED[True], UNTRIED[True], "fp16/packed/cudnn", UNTRIED[True]]
