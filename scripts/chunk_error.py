#!/usr/bin/env python3
"""Measures whether cutting a row into more chunks makes its numbers worse: the error against float64, chunk by chunk.

Takes    a device, a length, recipes.
Gives    one record of kind "chunk-error" a recipe on stdout; exit 1 if an error grows with the number of chunks.
Knows nothing of how fast any of it is.

    python scripts/chunk_error.py --device cuda --seq-len 65536 fp16/packed/cudnn fp16/packed/fa4 >> records.jsonl

The float64 row is the referee's, which shares no code with what it judges. `rms` is the error's norm over the row's.
"""

import argparse
import sys

import torch
from torch import Tensor

from frontier.case import Case
from frontier.chooser import choose
from frontier.data.generate import SeededSource
from frontier.data.sinks import MemorySink
from frontier.flows.engine import Engine
from frontier.judge.gate import compare
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.planner import Keeping, plan
from frontier.recipe import Recipe
from frontier.record import Record
from frontier.runner import facts_of_now
from frontier.spans import Span
from frontier.units import GIB
from referee.card import Card
from referee.layer import Shape

COUNTS = (1, 2, 8, 64)
# Of the error of one chunk, in which everything but the merge is the same; float32 sums add a rounding a merge.
MOST_GROWTH = 1.1
ROUNDING = 64**0.5 * 2**-24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", help="such as fp16/packed/cudnn")
    parser.add_argument("--case", default="14", help="whose shape is taken, but for its length and its rows")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--d-model", type=int)
    given = parser.parse_args()
    machine = Machine.detect(given.device)
    case = Case.load(given.case).override(batch_size=1, seq_len=given.seq_len, d_model=given.d_model)
    wanted_SD, grew = float64_row(case, machine), []
    for words in given.recipes:
        record = measure(case, machine, words, wanted_SD)
        print(record.to_json(), flush=True)
        grew += [f"{record.recipe} in {n} chunks" for n in record.notes["grew"]]
    print(
        f"the error grows: {', '.join(grew)}" if grew else "no error grows with the number of chunks", file=sys.stderr
    )
    raise SystemExit(1 if grew else 0)


def float64_row(case: Case, machine: Machine) -> Tensor:
    x_BSD = torch.empty(1, case.seq_len, case.d_model)
    source = SeededSource(case, machine.cores)
    source.read(Span(0, 1), x_BSD)
    source.close()
    shape = Shape(layers=case.layers, heads=case.heads, d_model=case.d_model, ffn_dim=case.ffn_dim, causal=case.causal)
    card = Card(torch.device(machine.device), shape, GIB)
    return card.run_stack(x_BSD[0].double(), torch.arange(case.seq_len), seeded_state(case))


def measure(case: Case, machine: Machine, words: str, wanted_SD: Tensor) -> Record:
    errors: dict[str, dict[str, float]] = {}
    for count in COUNTS:
        chunk = -(-case.seq_len // count)
        recipe = choose(case, machine, words, chunk=chunk).recipe
        got_SD = chunked(case, machine, recipe, chunk)
        verdict = compare(got_SD, wanted_SD, case.atol, case.rtol, 0)
        rms = float((got_SD - wanted_SD).norm() / wanted_SD.norm())
        errors[str(count)] = {"rms": rms, "budget": verdict.budget}
    least = errors["1"]["rms"]
    return Record(
        kind="chunk-error",
        **facts_of_now(machine),
        case=case.as_dict(),
        recipe=str(recipe),
        notes={
            "errors": errors,
            "grew": [n for n, error in errors.items() if not error["rms"] <= MOST_GROWTH * least + ROUNDING],
        },
    )


def chunked(case: Case, machine: Machine, recipe: Recipe, chunk: int) -> Tensor:
    made = plan(case, machine, recipe, Keeping(output="memory"), chunk=chunk)
    source, sink = SeededSource(case, machine.cores), MemorySink(case)
    with Engine(made, seeded_state(case)) as engine:
        engine.run_pass(source, sink)
    source.close()
    return sink.host_BSD[0]


if __name__ == "__main__":
    main()
