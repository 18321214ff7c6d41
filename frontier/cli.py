"""The command line: parse, call one function, print.

Takes    arguments.
Gives    data on stdout, talk on stderr, an exit code.
Knows nothing of how anything is done. Torch is imported only inside the commands that need it.
"""

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from frontier import __version__
from frontier.cli_dropin import export, grade
from frontier.cli_gate import gate
from frontier.cli_tune import choose, tune
from frontier.options import (
    Door,
    Stop,
    case_of,
    case_options,
    free_disk_bytes,
    machine_of,
    machine_options,
    plan_of,
    plan_options,
)


@click.group(cls=Door, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Exact attention over batches of giant sequences that no card can hold, streamed from host to host.

    Exit codes: 0 done and right, 1 a verdict failed, 2 bad input, 3 does not fit or not supported here,
    4 a number that is not finite, 130 stopped by request.
    """
    Stop.came = False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, Stop.handle)


@cli.command()
@click.argument("toml", nargs=-1)
@machine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line a case.")
def cases(toml: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """The shipped cases, or those given as names or TOML files: work, bytes, and whether they fit here."""
    from frontier.case import Case, shipped_names
    from frontier.chooser import choose
    from frontier.errors import FrontierError
    from frontier.planner import plan as make_plan
    from frontier.show import show_case
    from frontier.units import show_bytes

    machine = machine_of(options)
    for name in toml or shipped_names():
        case = Case.load(name)
        try:
            planned = make_plan(case, machine, choose(case, machine, try_kernels=False).recipe)
            held = show_bytes(planned.held_bytes("card"))
            fits = f"fits here: {planned.cut}, {held} on the device"
        except FrontierError as refusal:
            planned, fits = None, f"does not fit here: {refusal}"
        if as_json:
            facts = {"flops": case.flops, "input_bytes": case.input_bytes, "output_bytes": case.input_bytes}
            facts |= {"dense_scores_bytes": case.dense_scores_bytes, "fits": planned is not None}
            click.echo(json.dumps(case.as_dict() | facts))
        else:
            dense = show_bytes(case.dense_scores_bytes)
            click.echo(f"{show_case(case)}\n    a dense reference needs {dense} of scores a layer; {fits}")


@cli.command()
@machine_options
@click.option("--case", "case_name", default="14", show_default=True, help="Kernels are tried at its length.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line.")
def machine(case_name: str, as_json: bool, **options: Any) -> None:
    """The card, the host, and the attention kernels that pass a canary here, each refusal with its reason."""
    import dataclasses

    from frontier.case import Case
    from frontier.layers.canary import positions_tried, why_not
    from frontier.recipe import WORDS, Recipe
    from frontier.show import show_machine
    from frontier.stream.pinned import probe_pinning

    found = machine_of(options)
    case = Case.load(case_name)
    precision = "fp16" if found.has_card else "fp32"
    kernels = {
        word: why_not(case, Recipe(precision=precision, projection="packed", attention=word), found)  # type: ignore[arg-type]
        for word in WORDS["attention"]
    }
    pinning = probe_pinning() if found.has_card else None
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found) | {"attention": kernels, "pinning_s_per_gib": pinning}))
    else:
        click.echo(show_machine(found, kernels, f"{precision}, at {positions_tried(case, found):,} positions", pinning))


@cli.command()
@case_options
@machine_options
@plan_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line.")
def plan(as_json: bool, **options: Any) -> None:
    """The ledger of bytes against budgets, the cut, the time to expect; exit 3: does not fit. No row is touched."""
    from frontier.estimate import estimate
    from frontier.record import read_records
    from frontier.show import show_plan

    planned, choice = plan_of(options)
    guess = estimate(planned, read_records(), not options["resident"])
    if as_json:
        click.echo(json.dumps(planned.as_dict() | {"case": planned.case.as_dict(), "estimate": guess._asdict()}))
    else:
        click.echo(show_plan(planned, choice, guess, free_disk_bytes(options)))


@cli.command()
@case_options
@machine_options
@plan_options
@click.option("--input", "input_path", help="FILE.npy or .safetensors, or - for stdin (raw float32), not seeded rows.")
@click.option("--input-tensor", help="Which tensor of a .safetensors input, if it holds several.")
@click.option("--weights", type=click.Path(path_type=Path), help="FILE.safetensors instead of seeded weights.")
@click.option("--mask", help="FILE.npy, bool [batch_size, seq_len]: which tokens are valid.")
@click.option("--passes", type=click.IntRange(1), default=1, show_default=True, help="Times through the batch.")
@click.option("--ceilings/--no-ceilings", default=None, help="Also time card and road alone  [default: with 2+ passes]")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where the run is kept  [default: runs/CASE-TIME]")
@click.option("--overwrite", is_flag=True, help="Replace an existing output file and run directory.")
@click.option("--resume", is_flag=True, help="Go on with the run that was stopped or killed in --run-dir.")
@click.option(
    "--verify", is_flag=True, help="With --resume: hash every finished row, not a sample; mend an unfinished output."
)
@click.option("--trace", type=click.Path(path_type=Path), help="FILE.json in Chrome's trace format, for Perfetto.")
@click.option("--poison", is_flag=True, help="Fill every slot with NaN before use: a check of the pipeline.")
@click.option(
    "--allow-nonfinite", is_flag=True, help="Let a NaN or infinity of the input pass; it may spread over its whole row."
)
@click.option("--json", "as_json", is_flag=True, help="The record as one JSON line.")
@click.option("--quiet", is_flag=True, help="No progress, no talk.")
def run(as_json: bool, quiet: bool, **options: Any) -> None:
    """Stream a case from host to host through the card, and leave a run directory for the referee."""
    from frontier.errors import DataError
    from frontier.runner import Choices
    from frontier.show import show_plan_line, show_record
    from frontier.start import start

    if options["input_path"] and options["output"] == "none" and _is_default("output"):
        raise DataError(
            "an input file was given and no place for its output",
            hint="add --output FILE.npy, or --output none to drop it",
        )
    if (options["resume"] and not options["run_dir"]) or (options["verify"] and not options["resume"]):
        raise DataError(
            "--resume needs the --run-dir of the run to go on with, and --verify needs --resume",
            hint="give the command that was stopped once more, with --run-dir and --resume",
        )
    case_name, mask_path = options["case_name"], options["mask"]
    planned, choice = plan_of(options)
    Stop.heed()
    run_dir = options.pop("run_dir") or _new_run_dir(planned.case.name)
    if not quiet:
        click.echo(show_plan_line(planned, choice), err=True)
    ceilings = options["passes"] > 1 if options["ceilings"] is None else options["ceilings"]
    kept = ("passes", "resident", "watch", "poison", "allow_nonfinite", "trace", "verify")
    files = ("input_path", "input_tensor", "weights", "valid_BS", "output", "overwrite", "resume")
    record = start(
        planned,
        run_dir,
        case_file=case_name,
        mask_path=mask_path,
        quiet=quiet,
        choices=Choices(ceilings=ceilings, **{name: options[name] for name in kept}),
        **{name: options[name] for name in files},
    )
    text = record.to_json() if as_json else f"{show_record(record)}\nrun dir   {run_dir}"
    click.echo(text, err=options["output"] == "-")


@cli.command()
@case_options
@machine_options
@click.option("--recipe", help="Words such as fp16/packed/cudnn; parts left out are chosen.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="How many, from the case's on.")
@click.option("--json", "as_json", is_flag=True, help="A record a seed, one JSON line each.")
@click.option("--quiet", is_flag=True, help="No progress.")
def proxy(recipe: str | None, seeds: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Stream at a length whose dense reference fits, and judge every element by the official rule.

    Without --seq-len: the longest that fits the budget, up to 16,384.
    """
    from frontier.start import proxy_records

    seq_len = options["seq_len"]
    case, found = case_of(options), machine_of(options)
    failed = 0
    for record in proxy_records(case, found, recipe, seeds, given_length=seq_len is not None, quiet=quiet):
        verdict = record.verdicts["proxy"]
        failed += verdict["verdict"] != "pass"
        click.echo(record.to_json() if as_json else record.notes["sentence"])
    if failed:
        raise SystemExit(1)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def referee(arguments: tuple[str, ...]) -> None:
    """Judge a run directory in float64: `frontier referee RUN_DIR` is `referee check RUN_DIR`."""
    from referee.cli import check

    check.main([*arguments], prog_name="frontier referee")


@cli.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if RESULTS.md or the README is out of date.")
def report(check: bool) -> None:
    """Write RESULTS.md and the README's tables from the committed records."""
    from frontier.report.markdown import write_report

    changed = write_report(check=check)
    for path in changed:
        click.echo(f"{path} {'is out of date' if check else 'written'}")
    if check and changed:
        raise SystemExit(1)


for command in (gate, tune, choose, grade, export):
    cli.add_command(command)


def _is_default(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.DEFAULT


def _new_run_dir(case_name: str) -> Path:
    """runs/CASE-TIME, with a number behind it where that is taken."""
    wanted = f"{Path(case_name.split()[0]).stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = (f"{wanted}{suffix}" for suffix in ("", *(f"-{turn}" for turn in range(2, 1000))))
    return next(path for name in names if not os.path.lexists(path := Path("runs") / name))
