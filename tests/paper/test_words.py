"""Sizes, times, spans and recipes: said one way, and read back as they were said."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier.errors import CaseError
from frontier.recipe import REFERENCE, WORDS, Recipe, parse_recipe
from frontier.spans import Span, cut
from frontier.units import GIB, MIB, parse_bytes, show_bytes, show_flops, show_seconds

_parts: dict[str, Any] = {part: st.sampled_from(words) for part, words in WORDS.items() if part != "fusion"}
by_part = st.builds(Recipe, **_parts)
tails = st.builds(
    Recipe,
    **{part: _parts[part] for part in ("precision", "projection", "attention", "held", "launch")},
    fusion=st.just("tail"),
)
stacks = st.builds(Recipe, precision=_parts["precision"], fusion=st.just("stack"))
recipes = st.one_of(by_part, tails, stacks)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * GIB), ("256 MiB", 256 * MIB), ("13.1 GB", 13_100_000_000), ("1.5gib", 3 * GIB // 2),
        ("7", 7), (" 7 b ", 7), ("1 TiB", 1024 * GIB), ("2tb", 2 * 10**12), ("4 KiB", 4096), ("4kb", 4000),
    ],
)  # fmt: skip
def test_a_size_reads_as_it_is_written(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0", "0 GiB", "12 GiBs", "1e9", "1,000", "1.2.3 GB", "nan", "inf", "0.5", "0.1 B"]
)
def test_what_is_no_positive_size_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(CaseError, match="is not a size in bytes") as caught:
        parse_bytes(text)
    assert caught.value.hint == "write it as 12GiB, 256MiB or 13.1GB"


def test_a_size_past_all_floats_is_refused_too() -> None:
    with pytest.raises(CaseError, match="is not a size in bytes"):
        parse_bytes("9" * 400)


@given(st.integers(1, 1 << 62))
def test_a_shown_size_reads_back_to_its_two_decimals(count: int) -> None:
    back = parse_bytes(show_bytes(count).replace(",", ""))
    assert math.isclose(back, count, rel_tol=0.006)
    assert not math.isclose(2 * back, count, rel_tol=0.006)


@given(st.integers(1, 1 << 70))
def test_a_bare_number_of_bytes_is_read_exactly(count: int) -> None:
    assert parse_bytes(str(count)) == count


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"), (0.0123, "12.3 ms"), (4.56, "4.56 s"), (99.9, "99.9 s"), (200, "3 min 20 s"),
        (7500, "2 h 05 min"), (3599.9, "1 h 00 min"), (0.9996, "1 s"), (1.0, "1 s"), (100, "1 min 40 s"),
    ],
)  # fmt: skip
def test_a_duration_is_shown_as_people_read_it(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


@given(st.floats(1e-4, 1e5))
def test_a_duration_is_never_shown_with_an_exponent(seconds: float) -> None:
    assert "e" not in show_seconds(seconds)


@pytest.mark.parametrize(
    ("flops", "shown"), [(1.391e15, "1.391 PFLOP"), (2.5e12, "2.5 TFLOP"), (3e9, "3 GFLOP"), (1e6, "1 MFLOP")]
)
def test_work_is_shown_in_its_unit(flops: float, shown: str) -> None:
    assert show_flops(flops) == shown


@given(st.integers(0, 400), st.integers(1, 90))
def test_cut_spans_cover_the_total_once_and_in_order(total: int, size: int) -> None:
    spans = list(cut(total, size))
    assert [number for span in spans for number in range(span.start, span.stop)] == list(range(total))
    assert all(0 < len(span) <= size for span in spans)
    assert all(len(span) == size for span in spans[:-1])


def test_a_span_is_a_slice_of_its_length() -> None:
    assert list(range(10))[Span(2, 5).as_slice()] == [2, 3, 4] and len(Span(2, 5)) == 3


@given(recipes)
def test_a_recipe_reads_back_from_its_spelling(recipe: Recipe) -> None:
    assert parse_recipe(str(recipe), REFERENCE) == recipe


@given(by_part, recipes, st.randoms())
def test_the_order_of_words_is_free_and_unnamed_parts_are_the_bases(recipe: Recipe, base: Recipe, turn) -> None:  # type: ignore[no-untyped-def]
    words = str(recipe).split("/")
    turn.shuffle(words)
    assert parse_recipe("/".join(words), base) == recipe
    only = parse_recipe(recipe.attention, base)
    assert (only.precision, only.projection, only.attention) == (base.precision, base.projection, recipe.attention)
    assert only.fusion == ("by-part" if base.fusion == "stack" else base.fusion)  # a stack has no attention to choose


@given(recipes)
def test_stack_takes_its_precision_from_the_base_and_nothing_else(base: Recipe) -> None:
    assert parse_recipe("stack", base) == Recipe(precision=base.precision, fusion="stack")
    assert parse_recipe("stack/bf16", base) == Recipe(precision="bf16", fusion="stack")


def test_a_stack_with_parts_cannot_be_made() -> None:
    with pytest.raises(CaseError, match="fusion stack has no launch to choose"):
        Recipe(fusion="stack", launch="graph")


def test_each_word_belongs_to_one_part_only() -> None:
    words = [word for part in WORDS.values() for word in part]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("fp16/flsh", "recipe `fp16/flsh`: unknown word `flsh`", "did you mean `flash`?"),
        ("FP16", "unknown word `FP16`", "did you mean `fp16`?"),
        ("xyzzy!", "unknown word `xyzzy!`", "known words: fp32, tf32, tf32x3, fp16, bf16, separate, packed, dense"),
        ("fp16/stack/cudnn", "`stack` has no attention to choose", "leave out `cudnn`"),
        ("tail/triton-join", "`tail` has no join to choose", "leave out `triton-join`"),
        ("", "unknown word ``", "known words: fp32"),
        ("fp16/", "unknown word ``", "known words: fp32"),
        ("fp16/packed/bf16", "both `fp16` and `bf16` name the precision", "name each part once"),
        ("flash/flash", "both `flash` and `flash` name the attention", "name each part once"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_why(text: str, message: str, hint: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_recipe(text, REFERENCE)
    assert message in str(caught.value) and str(caught.value.hint).startswith(hint)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("word", "half", "width"), [("fp32", False, 4), ("tf32", False, 4), ("fp16", True, 2), ("bf16", True, 2)]
)
def test_a_precision_knows_its_bytes(word: str, half: bool, width: int) -> None:
    recipe = parse_recipe(word, REFERENCE)
    assert (recipe.is_half, recipe.working_bytes) == (half, width)
