"""The referee shares no code with what it judges, stays small, and judges itself."""

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

import referee
from referee.cli import cli
from referee.prove import CHANGES, FAITHFUL, FAULTS, prove

SOURCES = sorted(Path(referee.__file__).parent.glob("**/*.py"))
HERE = sorted(Path(__file__).parent.glob("*.py"))


OTHER = "frontier"


def names_frontier(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):  # import_module("..."), __import__("..."), run_module, subprocess
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if any(name.split(".")[0] == OTHER for name in names):
            return True
    return False


@pytest.mark.parametrize("path", SOURCES + HERE, ids=lambda path: path.name)
def test_no_import_names_frontier(path: Path) -> None:
    assert not names_frontier(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import frontier",
        "import os, frontier.case as c",
        "def f():\n from frontier import run",
        "__import__('frontier')",
    ],
)
def test_an_import_of_frontier_would_be_seen(source: str) -> None:
    assert names_frontier(source)
    assert not names_frontier(source.replace(OTHER, "referee"))


@pytest.mark.parametrize("path", SOURCES + HERE, ids=lambda path: path.name)
def test_no_file_is_long_and_each_door_has_its_sign(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    sign = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert sign
    if path in SOURCES:
        assert all(f"\n{word}" in sign for word in ("Takes ", "Gives ", "Knows nothing")), path.name


@pytest.fixture(scope="module")
def findings() -> dict[str, dict]:
    return {found["fault"]: found for found in prove()}


@pytest.mark.parametrize("fault", [f"{fault[0]} ({fault[1]})" for fault in FAULTS])
def test_the_proof_accepts_the_faithful_and_rejects_the_planted(fault: str, findings: dict[str, dict]) -> None:
    found = findings[fault]
    assert found["as_expected"]
    assert found["verdict"] == ("pass" if fault.startswith(FAITHFUL) else "fail")


@pytest.mark.parametrize("change", CHANGES)
def test_the_proof_has_changed_runs_refused(change: str, findings: dict[str, dict]) -> None:
    assert findings[change]["as_expected"]
    assert findings[change]["verdict"] == "refused"


def test_the_worst_place_of_a_single_fault_is_where_it_was_planted(findings: dict[str, dict]) -> None:
    def place(fault: str) -> tuple[int, int, int]:
        worst = findings[fault]["total"]["worst"]
        return worst["row"], worst["position"], worst["channel"]

    assert place("one flipped bit in an exponent (plain)") == (1, 150, 7)
    assert place("one NaN (plain)") == (0, 299, 63)
    assert place("one infinity (plain)") == (2, 0, 0)
    assert place("something in an invalid position (masked)") == (1, 10, 3)


def test_a_judge_that_lets_everything_pass_fails_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from referee import prove as room

    def blind(run_dir: Path) -> dict:
        return {"verdict": "pass", "total": referee.judge(run_dir)["total"]}

    monkeypatch.setattr(room, "judge", blind)
    monkeypatch.setattr(room, "FAULTS", FAULTS[:1] + FAULTS[-2:])
    monkeypatch.setattr(room, "CHANGES", {})
    result = CliRunner().invoke(cli, ["prove"])
    assert result.exit_code == 1
    assert result.stdout.count("WRONG") == 2
    assert "1 of 3 as they should be" in result.stdout
