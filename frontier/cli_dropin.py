"""The commands about the benchmark script: grade the drop-in by it, export the drop-in as one file.

Takes    arguments.
Gives    records on stdout or in a file, talk on stderr, exit code 1 if a verdict failed.
Knows nothing of how anything is done.
"""

from pathlib import Path
from typing import Any

import click

_file = click.Path(path_type=Path)


@click.command()
@click.option("--script", type=_file, required=True, help="The benchmark script, which stays as it is.")
@click.option("--cases", default="1-13", show_default=True, help="Such as 1-13, 2,6 or TOML files.")
@click.option("--drop-in", type=_file, help="FILE.py to take class and copy function from, instead of frontier's.")
@click.option("--output", type=_file, help="FILE.jsonl to append the records to, instead of stdout.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds for a case.")
@click.option("--commit", help="For a checkout without history: what the records name.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF THE SCRIPT]")
def grade(
    script: Path,
    cases: str,
    drop_in: Path | None,
    output: Path | None,
    timeout: float,
    commit: str | None,
    options: tuple[str, ...],
) -> None:
    """Run the benchmark script with the drop-in in its class's place, a fresh process a case: `-- --padding-ratio 0.3`.

    What follows `--` goes to the script. A record a case, failing and crashing ones too; exit 1 if any failed,
    or passed by a rule that is looser than the official one.
    """
    from frontier.errors import DataError
    from frontier.grading import Grader, cases_of, sentence

    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise DataError(f"no records can be put in `{output}`", hint="--output names a file in a folder that exists")
    grader = Grader(script=script, options=options, drop_in=drop_in, timeout_s=timeout)
    failed = 0
    for record in grader.records(cases_of(cases), commit):
        failed += not record.passed
        click.echo(sentence(record), err=True)
        _put(record, output)
    if failed:
        raise SystemExit(1)


@click.command()
@click.option("-o", "--output", type=_file, required=True, help="FILE.py to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def export(output: Path, overwrite: bool) -> None:
    """Write the drop-in as one Python file that needs torch alone."""
    from frontier.exporting import export as write

    click.echo(f"{output}: {write(output, overwrite=overwrite):,} bytes", err=True)


def _put(record: Any, output: Path | None) -> None:
    if output is None:
        click.echo(record.to_json())
        return
    with output.open("a") as file:
        file.write(record.to_json() + "\n")
