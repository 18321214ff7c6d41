"""The commands that learn which recipe serves a case best, and that tell it.

Takes    arguments.
Gives    outcomes and choices on stdout, talk on stderr.
Knows nothing of how anything is done. Torch is imported only inside the commands that need it.
"""

import json
import math
from pathlib import Path
from typing import Any

import click

from frontier.options import Stop, machine_of, machine_options

_cases = click.option("--case", "case_names", multiple=True, help="A shipped case or a TOML file; may be repeated.")


@click.command()
@_cases
@machine_options
@click.option("--recipes", multiple=True, help="Only these, separated by commas, in place of the table of candidates.")
@click.option("--without", multiple=True, help="No recipe that has this word, such as bf16.")
@click.option("--rounds", type=click.IntRange(2), default=6, show_default=True, help="Of timing, taken in turn.")
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=25,
    show_default=True,
    help="Of the gate, for each seed; fewer promote nothing.",
)
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Of weights, for the gate.")
@click.option(
    "--finalists",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Recipes that must pass the whole stress program; 0 screens and times only.",
)
@click.option("--yardstick/--no-yardstick", default=True, help="Time all beside torch.compile's best mode as well.")
@click.option("--output", type=click.Path(path_type=Path), help="FILE.jsonl  [default: configs/evidence/MACHINE.jsonl]")
@click.option("--again", is_flag=True, help="Do again what this very source has done on this machine.")
@click.option("--warm-caches", is_flag=True, help="Use compile caches that lie there; first results are not told.")
@click.option("--commit", help="For a checkout without history: what the records name.")
@click.option("--json", "as_json", is_flag=True, help="A record an outcome, one JSON line each.")
def tune(
    case_names: tuple[str, ...],
    recipes: tuple[str, ...],
    without: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Gate and time every recipe of the in-core cases (1 to 13, or those named), and record each outcome.

    What is recorded already for this machine, case, recipe and source is skipped, so a run that was cut short
    goes on where it was.
    """
    from frontier.case import Case, shipped_names
    from frontier.errors import DataError
    from frontier.gating import gate
    from frontier.recipe import REFERENCE, WORDS, parse_recipe
    from frontier.record import EvidenceFile, evidence_path
    from frontier.show import show_outcome
    from frontier.tuner import STRESS, Choices
    from frontier.tuner import tune as tune_cases

    cases = [Case.load(name) for name in case_names or shipped_names()[:-1]]
    texts = [text for several in recipes for text in several.split(",")]
    if unknown := set(without) - {word for words in WORDS.values() for word in words}:
        raise DataError(f"--without {min(unknown)}: no recipe has such a word", hint="name one of a recipe's words")
    machine = machine_of(options)
    choices = Choices(
        stress=STRESS | {"trials": options["trials"], "seeds": options["seeds"]},
        rounds=options["rounds"],
        finalists=options["finalists"],
        recipes=tuple(parse_recipe(text, REFERENCE) for text in texts),
        without=without,
        yardstick=options["yardstick"],
        again=options["again"],
        warm=options["warm_caches"],
        commit=options["commit"],
    )
    Stop.heed()
    if output is not None and not output.absolute().parent.is_dir():
        raise DataError(f"no folder `{output.parent}`", hint="make it, or name another --output")
    evidence = EvidenceFile(output or evidence_path(machine.name))
    click.echo(f"outcomes go to {evidence.path}", err=True)
    made = False
    for record in tune_cases(cases, machine, evidence, gate, choices):
        made = True
        click.echo(record.to_json() if as_json else show_outcome(record))
    if not made:
        click.echo("nothing is left to do: --again does once more what this very source has done here", err=True)


@click.command()
@_cases
@machine_options
@click.option(
    "--machine",
    "machine_name",
    help="A card by its records alone, in place of this one; what its kernels refuse is not asked.",
)
@click.option("--passes", type=click.IntRange(1), help="For `frontier run`, its start counted, in place of calls.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line a case.")
def choose(
    case_names: tuple[str, ...], machine_name: str | None, passes: int | None, as_json: bool, **options: Any
) -> None:
    """The recipe of each case (all, or those named) for calls on rows that lie on the device, and why.

    With --machine from records alone: the table of a card that is not here.
    """
    from frontier.case import Case, shipped_names
    from frontier.chooser import choose as choose_here
    from frontier.chooser import choose_on_paper
    from frontier.record import read_records

    cases = [Case.load(name) for name in case_names or shipped_names()]
    records, for_passes = list(read_records()), math.inf if passes is None else passes
    machine = machine_of(options) if machine_name is None else None
    for case in cases:
        if machine is None:
            choice = choose_on_paper(case, str(machine_name), records, for_passes)
        else:
            choice = choose_here(case, machine, records=records, passes=for_passes, try_kernels=False)
        if as_json:
            facts = {"case": case.name, "machine": machine_name or machine.name, "recipe": str(choice.recipe)}  # type: ignore[union-attr]
            click.echo(json.dumps(facts | {"why": choice.why, "passed_over": choice.passed_over}))
        else:
            click.echo(f"case {case.name}: {choice.recipe} ({choice.why})")
            for reason in choice.passed_over:
                click.echo(f"    not {reason}")
