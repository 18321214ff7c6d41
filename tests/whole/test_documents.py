"""What is written is what is: commands and flags are documented, tables are generated, the README keeps its shape."""

import re
from pathlib import Path

import click
import pytest

from frontier.cli import cli
from frontier.record import Record, read_records
from frontier.report.markdown import readme_text, results_text, write_report

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

# A flag is a promise: a change here must be meant.
FLAGS = {
    "cases": "device device-budget pinned-budget host-budget json",
    "machine": "device device-budget pinned-budget host-budget case json",
    "plan": "case batch-size seq-len d-model heads ffn-dim layers causal seed input-scale device device-budget "
    "pinned-budget host-budget recipe ring-depth flow chunk spool resident output watch json",
    "run": "case batch-size seq-len d-model heads ffn-dim layers causal seed input-scale device device-budget "
    "pinned-budget host-budget recipe ring-depth flow chunk spool resident output watch input input-tensor weights "
    "mask passes ceilings run-dir overwrite resume verify trace poison allow-nonfinite json quiet",
    "proxy": "case batch-size seq-len d-model heads ffn-dim layers causal seed input-scale device device-budget "
    "pinned-budget host-budget recipe seeds json quiet",
    "gate": "case batch-size seq-len d-model heads ffn-dim layers causal seed input-scale device device-budget "
    "pinned-budget host-budget recipe trials seeds input-scales padding adversarial json quiet",
    "tune": "case device device-budget pinned-budget host-budget recipes without rounds trials seeds finalists "
    "yardstick output again warm-caches commit json",
    "choose": "case device device-budget pinned-budget host-budget machine passes json",
    "grade": "script cases drop-in output timeout commit",
    "export": "output overwrite",
    "referee": "",
    "report": "check",
}


def flags_of(command: click.Command) -> set[str]:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return {name.removeprefix("--") for option in options for name in option.opts if name.startswith("--")}


def test_the_flags_are_the_promised_ones() -> None:
    assert {name: flags_of(command) for name, command in cli.commands.items()} == {
        name: set(flags.split()) for name, flags in FLAGS.items()
    }


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_each_command_has_help_and_stands_in_the_readme(name: str) -> None:
    command = cli.commands[name]
    assert command.help and f"`frontier {name}" in README
    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_results_and_readme_equal_the_report() -> None:
    assert write_report(ROOT, check=True) == []


def test_an_edited_table_or_a_new_record_is_noticed(tmp_path: Path) -> None:
    records = list(read_records())
    assert records
    text = (ROOT / "RESULTS.md").read_text()
    assert results_text(records) == text != results_text(records[:-1])
    edited = README.replace("| resident |", "| edited |", 1)
    assert edited != README and readme_text(edited, records) == README


def test_a_verdict_that_failed_stands_in_the_tables() -> None:
    record = next(r for r in read_records() if r.recipe.startswith("bf16") and r.kind == "proxy")
    assert not record.passed
    assert "| bf16/packed/cudnn | fail |" in results_text([record])


def test_a_refused_run_stands_in_a_table_of_its_own() -> None:
    base = next(record for record in read_records() if record.kind == "run")
    lost = Record(**{name: getattr(base, name) for name in Record.__slots__} | {"refused": "too big", "verdicts": {}})
    assert "### Refused" in results_text([lost]) and "too big" in results_text([lost])


def test_the_first_command_comes_before_line_20_with_real_output() -> None:
    lines = README.splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("$ "))
    assert first < 20 and "./scripts/quickstart" in lines[first - 1]
    assert "TODO" not in README and "QUICKSTART" not in README


def test_every_path_of_the_tree_exists() -> None:
    tree = README.split("## The tree", 1)[1].split("```")[1]
    for line in tree.strip().splitlines():
        words = line.split("   ")[0].split()
        parent = ROOT / "frontier" if line.startswith("  ") else ROOT
        for word in words:
            if re.fullmatch(r"[\w/]+(\.\w+|/)", word):
                assert (parent / word).exists(), word
