#!/usr/bin/env python3
"""What binds the calls of a case on a card: the hardware's own counters of each kernel of one call, as a record.

Takes    case names, recipes if not the chosen ones; Nsight Compute (`ncu`) on the PATH or in /opt/nvidia.
Gives    one record of kind "profile" a case: of each kernel its launches, microseconds and shares of what the card
         could do, in percent, and what its warps wait for.
Knows nothing of times as a user sees them, which `frontier tune` measures: counters slow a kernel down.

    python scripts/profile_kernels.py --output profile.jsonl 6 8 11 13
"""

import argparse
import csv
import glob
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from frontier.case import Case
from frontier.chooser import choose
from frontier.layers.program import make_program
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe
from frontier.record import Record
from frontier.runner import facts_of_now

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WAITS = ("long_scoreboard", "short_scoreboard", "barrier", "wait", "math_pipe_throttle", "mio_throttle", "selected")
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "issue slots busy": "sm__instruction_throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "L1": "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
} | {f"waits: {name.replace('_', ' ')}": STALL.format(name) for name in WAITS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["6", "8", "11", "13"])
    parser.add_argument("--recipe", help="of all cases, in place of each one's choice")
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line, behind those there")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        one_call(given.cases[0], given.recipe)
        return 0
    ncu = shutil.which("ncu") or min(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), default=None)
    if ncu is None:
        parser.error("there is no ncu (Nsight Compute) here: it comes with the CUDA toolkit")
    machine = Machine.detect("cuda")
    facts = facts_of_now(machine)
    facts |= {"commit": given.commit or facts["commit"]}
    for name in given.cases:
        case = Case.load(name)
        recipe = given.recipe or str(choose(case, machine, passes=float("inf")).recipe)
        child = [sys.executable, __file__, "--child", name, "--recipe", recipe, "--output", str(given.output)]
        metrics = ["--metrics", ",".join(COUNTERS.values()), "--clock-control", "none", "--profile-from-start", "off"]
        done = subprocess.run([ncu, *metrics, "--csv", *child], capture_output=True, text=True, check=False)
        kernels = kernels_of(done.stdout)
        refused = None if kernels else (done.stdout + done.stderr).strip().splitlines()[-1][:300]
        record = Record(
            kind="profile", case=case.as_dict(), recipe=recipe, flops=case.flops, refused=refused,
            notes={"name": f"case {name}", "kernels": kernels}, **facts,
        )  # fmt: skip
        with given.output.open("a") as file:
            file.write(record.to_json() + "\n")
        print(json.dumps({"case": name, "recipe": recipe, "kernels": kernels, "refused": refused}), flush=True)
    return 0


def one_call(name: str, words: str) -> None:
    """The third call alone lies between the profiler's start and stop: what is compiled and packed is there by then."""
    case, device = Case.load(name), torch.device("cuda:0")
    program = make_program(seeded_state(case), case, parse_recipe(words, REFERENCE), device)
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device=device)
    out_BSD = torch.empty_like(x_BSD)
    for turn in range(3):
        torch.cuda.synchronize()
        if turn == 2:
            torch.cuda.profiler.start()
        program(x_BSD, out_BSD)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def kernels_of(said: str) -> dict[str, dict[str, Any]]:
    """By kernel name: its launches, the sum of its microseconds, the other counters weighed by these."""
    lines = said.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, Any]] = {}
    names = {metric: name for name, metric in COUNTERS.items()}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].split("(")[0].split("<")[0][:60]})
        value = float(row["Metric Value"].replace(",", "") or "nan")
        scale = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3}.get(row["Metric Unit"], 1.0)
        launch[names[row["Metric Name"]]] = value * scale
    kernels: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(launch["kernel"] for launch in launches.values()):
        own = [launch for launch in launches.values() if launch["kernel"] == name]
        total_us = sum(launch["us"] for launch in own)
        weighed = {key: sum(one[key] * one["us"] for one in own) / total_us for key in COUNTERS if key != "us"}
        kernels[name] = {"launches": len(own), "us": round(total_us, 1)} | {k: round(v, 2) for k, v in weighed.items()}
    return kernels


if __name__ == "__main__":
    sys.exit(main())
