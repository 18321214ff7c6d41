"""`referee check --case FILE.toml`: the run must have computed that case; the referee reads the file itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from referee.case import Case

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "cases"
TOML = """name = "any name"
batch_size = 2
seq_len = 40
d_model = 16
heads = 2
ffn_dim = 24
layers = 1
seed = 5
[rule]
atol = 2e-3
rtol = 2e-2
"""


@pytest.fixture
def case_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "case.toml"
        path.write_text(text)
        return str(path)

    return write


def test_a_run_of_the_very_case_is_judged(check: Callable[..., Result], case_file: Callable[[str], str]) -> None:
    assert check("--case", case_file(TOML)).exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layers = 1", "layers = 2", "layers 1 is not 2"),
        ("seed = 5", "", "seed 5 is not 1234"),
        ("atol = 2e-3", "atol = 1e-3", "atol 0.002 is not 0.001"),
        ("seq_len = 40", "seq_len = 40\ncausal = false", "causal True is not False"),
    ],
)
def test_a_run_of_another_case_is_refused(
    refused: Callable[..., str], case_file: Callable[[str], str], old: str, new: str, words: str
) -> None:
    assert words in refused("--case", case_file(TOML.replace(old, new)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOML.replace("layers", "leyers"), "unknown key `leyers`"),
        (TOML.replace("atol", "atoll"), "unknown key `atoll`"),
        (TOML.replace("heads = 2", "heads = 3"), "16 channels do not split into 3 heads"),
        (TOML.replace("heads = 2", 'heads = "2"'), "`heads` should be a whole number"),
        ("name = ", "is no case file"),
    ],
)
def test_a_case_file_with_a_fault_is_refused_in_words(
    refused: Callable[..., str], case_file: Callable[[str], str], text: str, words: str
) -> None:
    assert words in refused("--case", case_file(text))


def test_every_shipped_case_is_read() -> None:
    cases = [Case.from_toml(path) for path in SHIPPED.glob("*.toml")]
    assert len(cases) == 14
    assert all(case.official_rule and case.causal for case in cases)
