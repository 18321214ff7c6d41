#!/usr/bin/env python3
"""Full series of the benchmark script over the in-core cases, each series in processes of its own.

Takes    the script, an output file, how many series; after `--` options for the script.
Gives    one record a run, failed ones too; on stdout the medians and spans of times and speedups, as Markdown.
Knows nothing of frontier but its command line.

    python scripts/release.py --script torch_transformer_benchmark.py --output release.jsonl
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GRADE = [sys.executable, "-c", "from frontier.cli import cli; cli()", "grade"]
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", required=True, help="the benchmark script")
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line, behind those there")
    parser.add_argument("--series", type=int, default=5)
    parser.add_argument("--cases", default="1-13")
    parser.add_argument("--drop-in", help="a file to take class and copy function from")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("options", nargs="*", help="for the script, after --")
    given = parser.parse_args()
    if given.series < 1:
        parser.error(f"--series {given.series}: name 1 or more")
    if given.output.is_dir() or not given.output.parent.is_dir():
        parser.error(f"no records can be put in `{given.output}`: --output names a file in a folder that exists")
    command = [*GRADE, "--script", given.script, "--cases", given.cases]
    command += ["--drop-in", given.drop_in] if given.drop_in else []
    command += ["--commit", given.commit] if given.commit else []
    records: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        for turn in range(1, given.series + 1):
            print(f"series {turn} of {given.series}", file=sys.stderr, flush=True)
            for record in run_series([*command, "--", *given.options]):
                record["notes"]["series"] = turn
                with given.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                records.append(record)
    except subprocess.CalledProcessError as failed:
        print(f"series {turn} ended with exit code {failed.returncode}: no more are run", file=sys.stderr)
        return failed.returncode
    except KeyboardInterrupt:
        print(f"stopped by request: {len(records)} records of this run are in {given.output}", file=sys.stderr)
        return 130
    print(table(records))
    return 0 if records and all(passed(record) for record in records) else 1


def run_series(command: list[str]) -> Iterator[dict[str, Any]]:
    """Each record as its case ends; talk goes to our stderr. Whoever stops this ends the series' processes too.

    Raises   CalledProcessError if the series ended otherwise than with 0, or 1: a verdict failed, as its record says.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as series:
        assert series.stdout is not None
        try:
            yield from map(json.loads, series.stdout)
        except BaseException:
            with contextlib.suppress(subprocess.TimeoutExpired):
                series.wait(2)  # Ctrl-C reaches it by itself; a second signal would cut its cleaning short
            series.terminate()
            series.wait()
            raise
    if series.returncode not in (0, 1):
        raise subprocess.CalledProcessError(series.returncode, command)


def passed(record: dict[str, Any]) -> bool:
    return bool(record["verdicts"]["script"]["verdict"] == "pass")


def table(records: list[dict[str, Any]]) -> str:
    """A row a case: the medians over its passing runs, with the least and the greatest; a line each failed run."""
    lines = [
        "| case | ran | passed | baseline ms | drop-in ms | speedup | largest error |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    failed, medians = [], []
    for name in dict.fromkeys(record["case"]["name"] for record in records):
        runs = [record for record in records if record["case"]["name"] == name]
        good = [record for record in runs if passed(record)]
        failed += [
            f"* case {name}, series {r['notes']['series']}: {r['notes']['reason']}" for r in runs if not passed(r)
        ]
        if not good:
            lines.append(f"| {name} | | 0 of {len(runs)} | | | | |")
            continue
        speedups = [record["notes"]["speedup"] for record in good]
        medians.append(statistics.median(speedups))
        columns = (
            name,
            " and ".join(dict.fromkeys(record["recipe"] for record in good)),
            f"{len(good)} of {len(runs)}",
            span([record["notes"]["baseline_ms"]["p50"] for record in good], ".4f"),
            span([record["notes"]["optimized_ms"]["p50"] for record in good], ".4f"),
            span(speedups, ".2f"),
            f"{max(record['verdicts']['script']['largest_error'] for record in good):.2g}",
        )
        lines.append(f"| {' | '.join(columns)} |")
    if medians:
        mean = math.exp(statistics.fmean(map(math.log, medians)))
        lines.append(f"\nGeometric mean of the median speedups of {len(medians)} cases: {mean:.2f}.")
    return "\n".join([*lines, *(["\nFailed runs:", *failed] if failed else [])])


def span(values: list[float], form: str) -> str:
    """The median, and from which to which value."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    raise SystemExit(main())
