"""A case says what to compute, or what in its TOML must be mended and how."""

import re
from pathlib import Path
from typing import Any

import pytest
from paper import small

from frontier.case import SHIPPED_CASES, Case, shipped_names
from frontier.errors import CaseError

CONTRACT = SHIPPED_CASES.parent / "CONTRACT.md"
GOOD = """
name = "mine"
batch_size = 2
seq_len = 100
d_model = 64
heads = 4
ffn_dim = 96
layers = 3
"""


def contract_rows() -> dict[str, tuple[int, ...]]:
    """case -> (B, d, H, S, L, ffn), parsed out of the contract's prose."""
    lines = CONTRACT.read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)]
    return {row[0]: tuple(map(int, row[1:])) for row in cells}


def test_the_contract_has_fourteen_cases_and_so_do_we() -> None:
    assert list(contract_rows()) == shipped_names() == [str(n) for n in range(1, 15)]


@pytest.mark.parametrize("name", [str(n) for n in range(1, 15)])
def test_a_shipped_case_equals_the_contracts_table(name: str) -> None:
    case = Case.load(name)
    shape = (case.batch_size, case.d_model, case.heads, case.seq_len, case.layers, case.ffn_dim)
    assert shape == contract_rows()[name]
    assert (case.name, case.causal, case.seed, case.input_scale, case.atol, case.rtol) == (
        name, True, 1234, 1.0, 0.002, 0.02,
    )  # fmt: skip


def test_a_table_with_one_other_number_would_be_seen() -> None:
    rows = contract_rows()
    assert len(set(rows.values())) == 14, "two cases are the same, so a swap of them could not be seen"
    assert len(rows["14"]) == 6


def test_case_14_counts_the_flops_of_the_contract() -> None:
    case = Case.load("14")
    assert f"{case.flops:.3e}" == "1.391e+15"
    by_row = case.batch_size * case.layers
    assert f"{by_row * case.linear_flops_per_row:.3e}" == "8.053e+13"
    assert case.row_bytes == 409_600_000 and case.input_bytes == 13_107_200_000 and case.head_width == 64
    assert f"{case.dense_scores_bytes / 1e12:.1f}" == "20.5"


@pytest.mark.parametrize(("causal", "pairs"), [(True, 1 + 2 + 3 + 4), (False, 16)])
def test_only_visible_pairs_count(causal: bool, pairs: int) -> None:
    case = small(seq_len=4, causal=causal)
    assert case.visible_pairs == pairs
    assert case.attention_flops_per_row == 4 * 128 * pairs
    assert case.linear_flops_per_row == 4 * 2 * (4 * 128**2 + 2 * 128 * 128)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_good_file_loads_with_the_official_defaults(tmp_path: Path) -> None:
    case = Case.load(write(tmp_path, GOOD + "[rule]\natol = 1e-3\n"))
    assert case == Case(
        name="mine", batch_size=2, seq_len=100, d_model=64, heads=4, ffn_dim=96, layers=3, atol=1e-3
    )  # fmt: skip
    assert Case.load(str(tmp_path / "mine.toml")) == case


FAULTS = {
    "unknown key, nearest": (
        GOOD + "bach_size = 3", "mine.toml: unknown key `bach_size`", "did you mean `batch_size`?"),
    "unknown key, none near": (GOOD + "zzz = 3", "unknown key `zzz`", "known keys: name, batch_size, seq_len"),
    "rule at the top": (GOOD + "atol = 1.0", "unknown key `atol`", "known keys: name"),
    "unknown rule": (GOOD + "[rule]\natoll = 1.0", "unknown key `rule.atoll`", "did you mean `rule.atol`?"),
    "rule is a number": (GOOD + "rule = 3", "`rule` is 3", "write it as a table: [rule]"),
    "missing": (GOOD.replace("heads = 4", ""), "mine.toml: no heads", "configs/cases/14.toml shows all the keys"),
    "missing two": (
        GOOD.replace("heads = 4", "").replace("layers = 3", ""), "mine.toml: no heads, layers", "shows all the keys"),
    "empty": ("", "mine.toml: no name, batch_size", "shows all the keys"),
    "text": (GOOD.replace("heads = 4", 'heads = "4"'), "case mine: heads is '4'", "heads must be a whole number"),
    "fraction": (GOOD.replace("layers = 3", "layers = 3.0"), "layers is 3.0", "layers must be a whole number"),
    "true": (GOOD.replace("layers = 3", "layers = true"), "layers is True", "layers must be a whole number"),
    "name": (GOOD.replace('"mine"', "7"), "name is 7", "name must be text"),
    "causal": (GOOD + "causal = 1", "causal is 1", "causal must be true or false"),
    "scale": (GOOD + 'input_scale = "big"', "input_scale is 'big'", "input_scale must be a number"),
    "list": (GOOD.replace("seq_len = 100", "seq_len = [1]"), "seq_len is [1]", "must be a whole number"),
    "zero": (GOOD.replace("seq_len = 100", "seq_len = 0"), "case mine: seq_len is 0", "at least 1"),
    "negative": (GOOD.replace("ffn_dim = 96", "ffn_dim = -1"), "case mine: ffn_dim is -1", "at least 1"),
    "not dividing": (
        GOOD.replace("heads = 4", "heads = 5"), "d_model 64 does not divide into 5 heads",
        "the nearest number of heads that divides it is 4"),
    "seed": (GOOD + "seed = -1", "seed -1", "0 .. 2^63 - 1"),
    "nan": (GOOD + "[rule]\nrtol = nan", "rtol is nan", "rtol must be positive and finite"),
    "inf": (GOOD + "input_scale = inf", "input_scale is inf", "input_scale must be positive and finite"),
    "no rule": (GOOD + "[rule]\natol = 0.0", "atol is 0.0", "atol must be positive and finite"),
    "huge": (GOOD + "[rule]\natol = 1" + "0" * 400, "atol is 1", "atol must be positive and finite"),
    "not TOML": ("name = ", "mine.toml is not TOML: ", "configs/cases/14.toml shows the form"),
    "twice": (GOOD + "heads = 4", "mine.toml is not TOML: ", "shows the form"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_says_what_and_how_to_mend_it(tmp_path: Path, fault: str) -> None:
    text, message, hint = FAULTS[fault]
    with pytest.raises(CaseError) as caught:
        Case.load(write(tmp_path, text))
    assert message in str(caught.value)
    assert hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_bytes_that_are_no_text_are_not_toml(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CaseError, match="is not TOML"):
        Case.load(tmp_path / "mine.toml")


@pytest.mark.parametrize("name", ["15", "", "no/such.toml", "configs"])
def test_no_such_case_lists_those_that_ship(name: str) -> None:
    with pytest.raises(CaseError, match=f"no case `{name}`") as caught:
        Case.load(name)
    assert caught.value.hint == (
        "shipped cases are 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14; a path to a TOML file works too"
    )


@pytest.mark.parametrize(
    ("width", "heads", "nearest"), [(64, 5, 4), (64, 7, 8), (1024, 1000, 1024), (100, 60, 50), (7, 3, 1), (8, 999, 8)]
)
def test_the_hint_names_the_nearest_number_of_heads(width: int, heads: int, nearest: int) -> None:
    with pytest.raises(CaseError) as caught:
        small(d_model=width, heads=heads)
    assert caught.value.hint == f"the nearest number of heads that divides it is {nearest}"


def test_an_override_changes_the_value_and_the_name() -> None:
    changed = small().override(seq_len=64, batch_size=None, seed=5)
    assert (changed.seq_len, changed.batch_size, changed.seed) == (64, 8, 5)
    assert changed.name == "small with seq_len=64 seed=5"


@pytest.mark.parametrize("changes", [{}, {"seq_len": None}, {"seq_len": 128}])
def test_an_override_that_changes_nothing_keeps_the_very_case(changes: dict[str, Any]) -> None:
    case = small()
    assert case.override(**changes) is case


@pytest.mark.parametrize("changes", [{"seq_len": 0}, {"heads": 3}, {"seq_len": "9"}])
def test_an_override_is_checked_like_a_file(changes: dict[str, Any]) -> None:
    with pytest.raises(CaseError) as caught:
        small().override(**changes)
    assert caught.value.hint


def test_a_case_survives_its_plain_values() -> None:
    case = Case.load("14")
    assert Case(**case.as_dict()) == case
    assert Case(**{**case.as_dict(), "seed": 1}) != case
