#!/usr/bin/env python3
"""Times the one-kernel stack under several cuts of a case, so that `layers/stack.py` can name numbers for its own.

Takes    case names, or all that one kernel serves; a file for the outcomes.
Gives    one record of kind "probe" a cut: milliseconds of single calls, the largest difference from the first cut's
         output, how many of its calls differed over poisoned scratch.
Knows nothing of gates or evidence: what wins here is still to be gated by `frontier tune`.

    python scripts/probe_cuts.py --output probe.jsonl 1 6 13
"""

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from frontier.case import Case
from frontier.layers import stack_cut
from frontier.layers.stack import StackProgram
from frontier.layers.stack_cut import Cut
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, parse_recipe
from frontier.record import Record
from frontier.runner import facts_of_now
from frontier.timelock import timing_window
from frontier.timing import time_in_turn

FEW = [Cut("heads", 16, 128, 64, 8, 1), Cut("heads", 16, 128, 64, 4, 1), Cut("heads", 32, 128, 64, 8, 1)]
MANY = [Cut("single", 64, 128, 64, 4, 3), Cut("single", 64, 128, 64, 4, 2), Cut("single", 64, 128, 128, 4, 3)]
MANY += [Cut("single", 64, 128, 32, 4, 3), Cut("single", 64, 128, 64, 8, 3), Cut("loop", 64, 64, 64, 4, 2)]
THIN = [Cut("single", 32, 128, 64, 4, 3), Cut("single", 32, 128, 64, 4, 2)]
LONG = [Cut("loop", 64, 64, 64, 4, 3), Cut("loop", 64, 64, 64, 4, 2), Cut("loop", 64, 128, 64, 4, 2)]
LONG += [Cut("loop", 64, 64, 32, 4, 3), Cut("loop", 128, 64, 64, 8, 2), Cut("loop", 64, 128, 64, 4, 3)]
LONG += [
    Cut("loop", 64, 64, 64, 4, 3, 64),
    Cut("loop", 64, 64, 32, 4, 3, 64, 168),
    Cut("loop", 64, 64, 64, 4, 2, 64, 168),
]
FULL = [Cut("single", 64, 128, 64, 4, 2), Cut("loop", 64, 64, 64, 4, 3), Cut("loop", 64, 64, 128, 4, 2)]
FULL += [Cut("loop", 64, 64, 64, 4, 2), Cut("loop", 64, 64, 128, 4, 1), Cut("loop", 128, 128, 64, 8, 2)]
FULL += [
    Cut("loop", 64, 64, 64, 4, 3, 64),
    Cut("loop", 64, 64, 64, 4, 2, 64, 168),
    Cut("loop", 64, 64, 64, 8, 2, 64, 128),
]
NINE = [Cut("loop", 64, 64, 64, 4, 2), Cut("loop", 64, 64, 128, 4, 2), Cut("loop", 64, 64, 64, 4, 1), MANY[1]]
WIDE = [Cut("single", 64, 128, 64, 4, 3, 64), Cut("single", 64, 128, 64, 8, 2), Cut("loop", 64, 64, 64, 4, 3)]
SHORT = [Cut("heads", 16, 32, 64, 8, 1), Cut("heads", 16, 32, 64, 4, 1), Cut("single", 32, 32, 64, 4, 3)]
CUTS: dict[str, list[Cut]] = {
    "1": MANY, "2": FEW, "3": FEW, "4": FEW, "5": MANY, "6": FULL, "7": MANY[:2], "9": NINE, "10": MANY,
    "11": MANY + THIN + WIDE, "12": SHORT, "13": LONG,
}  # fmt: skip
HELD = {"7": "fp16/stack/held-all"}


def program_of(case: Case, cut: Cut, words: str, device: torch.device) -> StackProgram:
    program = StackProgram(seeded_state(case), case, parse_recipe(words, REFERENCE), device)
    stack_cut.cut_of = lambda *given: cut  # type: ignore[assignment]  # a probe: the table is what it is to write
    return program


def compile_one(job: tuple[str, Cut, str]) -> None:
    """One call, for its kernel's sake: what is compiled lies in Triton's cache when it is timed."""
    name, cut, words = job
    case = Case.load(name)
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device="cuda")
    try:
        program_of(case, cut, words, torch.device("cuda:0"))(x_BSD, torch.empty_like(x_BSD))
        torch.cuda.synchronize()
    except Exception as error:
        print(f"case {name} {cut}: {str(error).splitlines()[0]}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CUTS))
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line, behind those there")
    parser.add_argument("--commit", help="for a checkout without history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA card here, and this measures one")
    jobs = [(name, cut, words) for name in options.cases for cut in CUTS[name] for words in words_of(name)]
    with multiprocessing.get_context("spawn").Pool(12, maxtasksperchild=1) as pool:
        pool.map(compile_one, jobs, chunksize=-(-len(jobs) // 12))
    machine = Machine.detect("cuda")
    facts = facts_of_now(machine)
    facts |= {"commit": options.commit or facts["commit"]}
    with timing_window(machine), options.output.open("a") as file:
        for name in options.cases:
            for words in words_of(name):
                for line in outcomes(name, words, machine):
                    file.write(record_of(line, facts).to_json() + "\n")
                    print(line, flush=True)


def record_of(line: dict[str, Any], facts: dict[str, Any]) -> Record:
    case = Case.load(line.pop("case"))
    own = {key: line.pop(key) for key in ("recipe", "refused", "call_ms") if key in line}
    return Record(kind="probe", case=case.as_dict(), flops=case.flops, notes=line, **own, **facts)


def words_of(name: str) -> list[str]:
    return ["fp16/stack", *([HELD[name]] if name in HELD else [])]


def outcomes(name: str, words: str, machine: Machine) -> list[dict[str, Any]]:
    """All cuts of a case in turn; scratch is poisoned and each cut called again and again: a race would differ."""
    case, device = Case.load(name), torch.device(machine.device)
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device=device)
    out_BSD, first_BSD = torch.empty_like(x_BSD), None
    calls, lines = {}, []
    for cut in CUTS[name]:
        line: dict[str, Any] = {"case": name, "recipe": words, "name": str(cut)}
        lines.append(line)
        program = program_of(case, cut, words, device)
        try:
            program(x_BSD, out_BSD)
            torch.cuda.synchronize(device)
        except Exception as error:
            line["refused"] = str(error).splitlines()[0]
            continue
        once_BSD = out_BSD.clone()
        differing = 0
        for _ in range(20 if case.batch_size < 1000 else 3):
            for scratch in program._scratch.values():
                scratch.turns[0].qkv.fill_(torch.nan)
            program(x_BSD, out_BSD)
            differing += not torch.equal(out_BSD, once_BSD)
        first_BSD = once_BSD if first_BSD is None else first_BSD
        line |= {"from_first": float((once_BSD - first_BSD).abs().max()), "differing": differing}
        calls[str(cut)] = (line, lambda program=program: program(x_BSD, out_BSD))
    times = time_in_turn({key: call for key, (_, call) in calls.items()}, device, 4)
    for key, (line, _) in calls.items():
        line["call_ms"] = times[key].as_dict()
    return lines


if __name__ == "__main__":
    main()
