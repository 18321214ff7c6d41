#!/usr/bin/env python3
"""The whole series of case 14 on one card, in one go, since card time is scarce.

Takes    an output file and, where the checkout has no history, the commit to put into the records.
Gives    one record a line, each with the seconds of its whole command and the referee's verdict; a log.
Knows nothing of frontier but its command line.

    python scripts/series.py --output configs/evidence/nvidia-h200.jsonl
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FRONTIER = [sys.executable, "-c", "from frontier.cli import cli; cli()"]
REFEREE = [sys.executable, "-c", "from referee.cli import cli; cli()"]
RUNS = Path("runs/series")

CUDNN, FA4 = ["--recipe", "fp16/packed/cudnn"], ["--recipe", "fp16/packed/fa4"]
BF16 = ["--recipe", "bf16/packed/cudnn"]
RESIDENT, FLY = ["--resident", "--passes", "3"], ["--on-the-fly"]


def series(output_folder: str) -> dict[str, tuple[list[str], bool]]:
    """Name -> (arguments of `frontier run --case 14`, whether the referee judges that very run)."""
    file = ["--output", f"{output_folder}/case14.npy", "--overwrite"]
    return {
        "whole command, on the fly": ([*CUDNN, *FLY], False),
        "resident": ([*CUDNN, *RESIDENT], True),
        "resident, FA4": ([*FA4, *RESIDENT], True),
        "on the fly": ([*CUDNN, *FLY, "--passes", "3", "--no-ceilings"], False),
        "on the fly, FA4": ([*FA4, *FLY, "--passes", "3", "--no-ceilings"], False),
        "12 GiB card": ([*CUDNN, *RESIDENT, "--no-ceilings", "--device-budget", "12GiB"], False),
        "12 GiB card, FA4": ([*FA4, *RESIDENT, "--no-ceilings", "--device-budget", "12GiB"], False),
        "6 GiB card": ([*CUDNN, *RESIDENT, "--no-ceilings", "--device-budget", "6GiB"], False),
        "6 GiB card, FA4": ([*FA4, *RESIDENT, "--no-ceilings", "--device-budget", "6GiB"], False),
        "to a file": ([*CUDNN, *FLY, *file], False),
        "whole command, on the fly, FA4": ([*FA4, *FLY], False),
        "on the fly, flash": (["--recipe", "fp16/packed/flash", *FLY, "--ceilings"], False),
        "bf16, a recipe one may ask for": ([*BF16, *FLY], False),
    }


HEADLINES = ("resident", "resident, FA4", "12 GiB card, FA4", "6 GiB card, FA4", "on the fly, FA4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--only", help="names of the series, separated by `;`")
    parser.add_argument("--proxy-seeds", type=int, default=3)
    parser.add_argument("--referee", choices=("yes", "no", "only"), default="yes", help="only: judge what ran before")
    parser.add_argument("--output-folder", default="/dev/shm", help="where the run with a file output writes it")
    options = parser.parse_args()
    chosen = {
        n: v for n, v in series(options.output_folder).items() if not options.only or n in options.only.split(";")
    }
    records = Records(options.output)
    if options.referee != "only":
        run_all(chosen, options, records)
    if options.referee != "no":
        judge_all([name for name, (_, judged) in chosen.items() if judged], records)
    print(f"{len(records.kept)} records in {options.output}", file=sys.stderr)
    return 0 if records.kept else 1


class Records:
    """The records of a file by name, written anew after each change: a series that is cut short loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        self.kept: dict[str, dict[str, Any]] = {record["notes"]["name"]: record for record in map(json.loads, lines)}

    def put(self, name: str, record: dict[str, Any]) -> None:
        record["notes"]["name"] = name
        self.kept[name] = record
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.kept.values()))
        partial.replace(self._path)


def run_all(chosen: dict[str, tuple[list[str], bool]], options: Any, records: Records) -> None:
    """Proxies first (correct, then fast), then every run, each in a process of its own."""
    for kernel, seeds in ((CUDNN, options.proxy_seeds), (FA4, options.proxy_seeds), (BF16, 1)):
        answer, _ = call([*FRONTIER, "proxy", "--case", "14", *kernel, "--seeds", str(seeds), "--json", "--quiet"])
        for line in answer.splitlines():
            record = json.loads(line)
            record["command"] = shlex.join(["frontier", "proxy", "--case", "14", *kernel, "--seeds", str(seeds)])
            name = f"proxy {record['recipe']} seed {record['case']['seed']}"
            records.put(name, stamped(record, options.commit))
            print(record["notes"]["sentence"], file=sys.stderr, flush=True)
    for name, (arguments, _) in chosen.items():
        folder = RUNS / slug(name)
        shutil.rmtree(folder, ignore_errors=True)
        command = ["run", "--case", "14", *arguments, "--run-dir", str(folder), "--json", "--quiet"]
        answer, seconds = call([*FRONTIER, *command])
        for path in Path(options.output_folder).glob("case14.npy*"):
            path.unlink()
        if not answer.strip():
            continue
        record = stamped(json.loads(answer), options.commit)
        record["command"] = shlex.join(["frontier", *command[:-4]])
        record["notes"] |= {"command_s": round(seconds, 2), "headline": name in HEADLINES}
        if "--device-budget" in arguments:
            record["notes"]["device_budget"] = arguments[arguments.index("--device-budget") + 1]
        records.put(name, record)
        print(f"{name}: passes {record['pass_s']}, card {record['card_s']}, whole command {seconds:.1f} s", flush=True)


def judge_all(names: list[str], records: Records) -> None:
    """Every watched row, every position, in float64 on the CPU."""
    for name in names:
        folder = RUNS / slug(name)
        call([*REFEREE, "check", str(folder), "--case", "configs/cases/14.toml"])
        verdict_file = folder / "verdict.json"
        if verdict_file.is_file() and name in records.kept:
            record = records.kept[name]
            record["verdicts"]["referee"] = summary(json.loads(verdict_file.read_text()))
            records.put(name, record)
            print(f"{name}: referee {record['verdicts']['referee']}", flush=True)


def summary(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a record keeps of the referee's verdict file."""
    total, worst = verdict["total"], verdict["total"]["worst"]
    return {
        "verdict": verdict["verdict"],
        "official_rule": verdict["official_rule"],
        "rows": len(verdict["rows"]),
        "positions": verdict["positions"],
        "elements": total["elements"],
        "failing": total["failing"],
        "budget": worst["budget_fraction"],
        "place": f"row {worst['row']}, position {worst['position']}, channel {worst['channel']}",
        "seconds": verdict["wall_s"],
        "threads": verdict["threads"],
    }


def call(command: list[str]) -> tuple[str, float]:
    """Standard output and seconds of one command; its talk goes to our stderr."""
    began_s = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - began_s
    print(f"[{seconds:6.1f} s, exit {done.returncode}] {' '.join(command[3:])}", file=sys.stderr, flush=True)
    return done.stdout, seconds


def stamped(record: dict[str, Any], commit: str | None) -> dict[str, Any]:
    record["commit"] = commit or record["commit"]
    return record


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


if __name__ == "__main__":
    raise SystemExit(main())
