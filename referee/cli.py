"""The command line: parse, call one function, print; the only room that turns faults into text and exit codes.

Takes    `check RUN_DIR` and `prove`.
Gives    data on stdout, talk on stderr; exit 0 pass, 1 fail, 2 cannot judge.
Knows nothing of how a verdict is reached; imports no torch until a command needs it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from referee.errors import CannotJudge

UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 1000, "mb": 10**6, "gb": 10**9}


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """An option's type, from a function that raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except (ValueError, KeyError, AttributeError):
            self.fail(f"{value!r} is no {self.name}", param, ctx)


def parse_bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)\s*([a-z]*)", text.strip().lower()).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit])


def parse_rows(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_positions(text: str) -> int | None:
    if text != "all" and int(text) < 1:
        raise ValueError
    return None if text == "all" else int(text)


@contextmanager
def _door() -> Iterator[None]:
    """Faults become words and exit codes here: 1 is kept for a verdict, so nothing unforeseen may end as 1."""
    try:
        yield
    except CannotJudge as fault:
        click.echo(f"error: {fault}\nhint: {fault.hint}", err=True)
        sys.exit(fault.exit_code)
    except KeyboardInterrupt:
        click.echo("error: interrupted before a verdict\nhint: judge fewer `--rows` or `--positions`", err=True)
        sys.exit(130)
    except Exception as fault:
        traceback.print_exc()
        click.echo(
            f"error: no verdict: {fault}\nhint: the referee itself failed; please report the lines above", err=True
        )
        sys.exit(2)


@click.group()
def cli() -> None:
    """Judge a run in float64, from its run directory alone."""


@cli.command()
@click.argument("run_dir", type=click.Path())
@click.option(
    "--case",
    "case_file",
    type=click.Path(path_type=Path),
    help="FILE.toml that the run must have computed, field by field.",
)
@click.option(
    "--rows", type=Parsed("list of rows", parse_rows), help="Watched rows to judge, as 0,17. Default: all of them."
)
@click.option(
    "--positions",
    type=Parsed("number of positions", parse_positions),
    default="all",
    show_default=True,
    help="How many positions to judge: the first and last 256, the rest drawn with a fixed seed.",
)
@click.option(
    "--memory",
    type=Parsed("amount of memory", parse_bytes),
    default="2GiB",
    show_default=True,
    help="Bound on attention scores in flight; a row's own float64 arrays come on top: 48 bytes x seq_len x d_model."
    " On a card: bound on all that is held there.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where to compute: cpu, cuda or cuda:1. Every device works in float64.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Default: every core this process may use.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--quiet", is_flag=True, help="No talk on stderr.")
def check(
    run_dir: str,
    case_file: Path | None,
    rows: list[int] | None,
    positions: int | None,
    memory: int,
    device: str,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Recompute the watched rows of RUN_DIR and compare. Exit 0 pass, 1 fail, 2 cannot judge.

    Writes RUN_DIR/verdict.json.
    """
    with _door():
        from referee.verdict import judge

        verdict = judge(
            run_dir,
            case_file=case_file,
            rows=rows,
            positions=positions,
            scores_bytes=memory,
            threads=threads,
            device=device,
            command=shlex.join(["referee", "check", *sys.argv[2:]]),
            quiet=quiet,
        )
        if as_json:
            click.echo(json.dumps(verdict, indent=1))
        else:
            for row in verdict["rows"]:
                click.echo(f"row {row['row']:<6d} {_line(row)}   {row['wall_s']:.1f} s")
            case = verdict["case"]
            rule = f"|u-r| < {case['atol']:g} or < {case['rtol']:g} |r|"
            click.echo(f"{_line(verdict['total'])}   {verdict['wall_s']:.1f} s in all")
            places = verdict["positions"]
            if places["judged"] < places["of"]:
                click.echo(f"positions  {places['judged']:,} of {places['of']:,} in a row were judged")
            click.echo(f"rule       {rule}{'' if verdict['official_rule'] else '   NOT the official rule'}")
        sys.exit(0 if verdict["verdict"] == "pass" else 1)


def _line(tally: dict[str, Any]) -> str:
    return (
        f"{tally['verdict']}   {tally['failing']:,} of {tally['elements']:,} fail, {tally['nonfinite']:,} nonfinite;"
        f" worst {describe(tally['worst'])}"
    )


def describe(worst: dict[str, Any]) -> str:
    """The worst element in words."""
    values = [f"{worst[key]:.6g}" if isinstance(worst[key], float) else worst[key] for key in ("output", "reference")]
    share = f"{worst['budget_fraction']:.3g}" if isinstance(worst["budget_fraction"], float) else "inf"
    place = f"row {worst['row']} position {worst['position']} channel {worst['channel']}"
    return f"{share} of the budget at {place}: output {values[0]}, reference {values[1]}"


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def prove(as_json: bool) -> None:
    """Judge the judge: accept faithful outputs, reject each planted fault. Exit 0 only if all is as it should be."""
    with _door():
        from referee.prove import prove as run_proof

        findings = run_proof()
        if as_json:
            click.echo(json.dumps(findings, indent=1))
        else:
            for found in findings:
                mark = "ok   " if found["as_expected"] else "WRONG"
                click.echo(f"{mark}  {found['verdict']:<12} {found['fault']:<44} {found['evidence']}")
            wrong = sum(not found["as_expected"] for found in findings)
            click.echo(f"{len(findings) - wrong} of {len(findings)} as they should be")
        sys.exit(0 if all(found["as_expected"] for found in findings) else 1)
