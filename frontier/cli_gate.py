"""The `gate` command: parse, judge, print.

Takes    arguments.
Gives    a table or a record on stdout, a line a group of trials on stderr, exit code 1 if a trial failed.
Knows nothing of how a trial is judged. Torch is imported only inside.
"""

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from frontier.options import Stop, case_of, case_options, machine_of, machine_options

if TYPE_CHECKING:
    from frontier.judge.promotion import GateReport, Group


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.2 on
    """Numbers such as 0,0.3, each from `least` up to, not including, `limit`."""

    name = "numbers"

    def __init__(self, least: float, limit: float) -> None:
        self.least, self.limit = least, limit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(float(part) for part in value.split(",")))
        except ValueError:
            self.fail(f"`{value}` is no list of numbers; write it as 0,0.3", param, ctx)
        if not all(self.least <= number < self.limit for number in numbers):
            self.fail(f"`{value}`: each must lie in [{self.least:g}, {self.limit:g})", param, ctx)
        return numbers


@click.command()
@case_options
@machine_options
@click.option("--recipe", help="Words such as fp16/packed/short; parts left out are chosen.")
@click.option("--trials", type=click.IntRange(1), default=25, show_default=True, help="Inputs a seed of weights.")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Of weights, from the case's on.")
@click.option(
    "--input-scales",
    type=Numbers(1e-30, 1e30),
    default="1e-3,1e-2,1,10,100",
    show_default=True,
    help="Of the inputs, each times the case's own.",
)
@click.option(
    "--padding", type=Numbers(0, 1), default="0,0.3", show_default=True, help="Largest padded share of a row's end."
)
@click.option("--adversarial/--no-adversarial", default=True, help="Also inputs and masks that nobody would wish.")
@click.option("--json", "as_json", is_flag=True, help="The record as one JSON line.")
@click.option("--quiet", is_flag=True, help="Nothing on stderr while it goes on.")
def gate(as_json: bool, quiet: bool, recipe: str | None, **options: Any) -> None:
    """Judge a recipe on every element of many trials against the dense reference, with TF32 off and on.

    The reference with TF32 off is next to the truth; with it on it is what the benchmark script compares with.
    """
    from frontier.chooser import choose
    from frontier.gating import gate as judge
    from frontier.record import Record
    from frontier.runner import facts_of_now
    from frontier.show import show_case
    from frontier.timelock import using_card

    case, machine = case_of(options), machine_of(options)
    Stop.heed()
    began = time.monotonic()

    def watch(group: "Group") -> None:
        if not quiet:
            click.echo(f"{time.monotonic() - began:8.1f} s  {_group_line(group)}", err=True)

    with using_card(machine):
        choice = choose(case, machine, recipe, passes=math.inf)
        if not quiet:
            click.echo(f"{show_case(case)}\nrecipe {choice.recipe} ({choice.why})", err=True)
        report = judge(case, machine, choice.recipe, watch=watch, **options)
    if as_json:
        record = Record(
            kind="gate",
            **facts_of_now(machine),
            case=case.as_dict(),
            recipe=str(choice.recipe),
            flops=case.flops,
            verdicts={"gate": report.as_dict()},
        )
        click.echo(record.to_json())
    else:
        click.echo("\n".join(_lines(report)))
    if not report.passes:
        raise SystemExit(1)


def _group_line(group: "Group") -> str:
    state = "pass" if group.passes else "FAIL"
    return f"{state}  {group.name}: {len(group.trials)} trials, {max(group.budgets('exact')):.3g} of the exact budget"


def _lines(report: "GateReport") -> Iterator[str]:
    """What was judged by what, a row a group, the worst element, each condition, the verdict."""
    case = report.case
    rule = f"|u-r| < {case.atol:g} or < {case.rtol:g} |r|{'' if case.has_official_rule else ', NOT the official rule'}"
    yield f"case {case.name}, recipe {report.recipe} on {report.machine}; budget fractions, 1 fails: {rule}"
    yield "exact: dense float32 without TF32" + (
        "; script: with TF32, as the benchmark script computes; noise: exact judged by script"
        if report.has_tf32
        else "; a CPU has no TF32, so the script's reference is the same"
    )
    if report.masked_rows < case.batch_size:
        yield f"trials with masks take the first {report.masked_rows} of {case.batch_size:,} rows"
    words = ("exact", "script", "noise") if report.has_tf32 else ("exact",)
    yield f"\n{'inputs':<28}{'trials':>7}" + "".join(f"{word:>9}{'failed':>7}" for word in words) + "  five more fail"
    for group in report.groups:
        cells = []
        for word in words:
            most = max(group.budgets(word), default=None)
            cells.append(f"{'-':>9}{'':>7}" if most is None else f"{most:>9.3g}{getattr(group, f'failed_{word}'):>7}")
        notes = []
        if group.trials[0].stress is None:
            odds = group.odds(words[min(1, len(words) - 1)])
            notes.append(f"{odds.likely:.2g} (at most {odds.upper:.2g})")
        if group.excused:
            notes.append("judged by exact alone: float32 itself fails script")
        notes += sorted({f"judged by {trial.judged_by}" for trial in group.trials if trial.judged_by != "float32"})
        notes += sorted({fault for trial in group.trials for fault in trial.faults})
        yield f"{group.name:<28}{len(group.trials):>7}{''.join(cells)}  {'; '.join(notes)}".rstrip()
    if (worst := report.worst) is not None:
        told = worst.exact
        yield (
            f"\nworst     {told.budget:.3g} at {worst.name}, weights {worst.seed}, input {worst.number}: "
            f"row {told.row}, position {told.position}, channel {told.channel} is {told.got:.6g}, "
            f"the reference {told.wanted:.6g}"
        )
    yield "to be promoted"
    yield from (f"    {'yes' if c.holds else 'NO':<4}{c.name}: {c.why}" for c in report.conditions)
    verdict = "pass" if report.passes else "FAIL"
    yield f"verdict   {verdict}; {'may be promoted' if report.promotable else 'not to be promoted'}"
