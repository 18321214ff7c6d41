"""The five lines of Python that the package promises, as they stand."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from commandline import SIZES

import frontier
from frontier import case as case_room

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def small_shipped_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14 is what `SIZES` says: the lines are run unchanged, the work is small."""
    cases = tmp_path / "configs" / "cases"
    cases.mkdir(parents=True)
    lines = ['name = "14"', *(f"{key} = {size}" for key, size in SIZES.items())]
    (cases / "14.toml").write_text("\n".join(lines))
    monkeypatch.setattr(case_room, "SHIPPED_CASES", cases)


def the_lines(text: str) -> str:
    found = re.search(r"^( *)import frontier\n\n?(?:\1\S.*\n)+", text, re.MULTILINE)
    assert found, "no five lines"
    return textwrap.dedent(found[0])


@pytest.mark.usefixtures("small_shipped_cases")
def test_the_docstrings_five_lines_run() -> None:
    lines = the_lines(frontier.__doc__ or "")
    assert [line.partition(" =")[0] for line in lines.splitlines()[2:]] == [
        "case", "machine", "recipe", "plan", "record",
    ]  # fmt: skip
    names: dict[str, object] = {}
    exec(lines, names)
    record = names["record"]
    assert isinstance(record, frontier.Record)
    assert record.case["seq_len"] == SIZES["seq_len"] and len(record.pass_s) == 1


@pytest.mark.usefixtures("small_shipped_cases")
@pytest.mark.skipif(not README.exists(), reason="no README yet")
def test_the_readmes_lines_of_python_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks, "the README shows no Python"
    for lines in blocks:
        exec(lines, {"np": np})


def test_what_the_package_offers_can_be_had() -> None:
    for name in frontier.__all__:
        assert getattr(frontier, name) is not None
    with pytest.raises(AttributeError, match="has no `nonsense`"):
        _ = frontier.nonsense
