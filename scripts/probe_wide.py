#!/usr/bin/env python3
"""Times ways to run a wide stack by parts, to see which of them hides the residual's traffic behind the GEMMs.

Takes    a case that no one kernel holds (8); a file for the outcomes.
Gives    one record of kind "probe" a way: milliseconds of single calls, all ways in turn; the largest difference from
         the first's output.
Knows nothing of gates or evidence: what wins here is still to be built, and gated by `frontier tune`.

    python scripts/probe_wide.py --output probe.jsonl 8

"in slices of N": rows of N tokens go through the whole stack before the next, to stay in the card's cache.
"two streams": two halves of the batch side by side, so that joins of one may run beside GEMMs of the other.
"sum in the GEMM": the GEMMs behind attention and gelu add into the float32 residual, and a norm only reads it.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers import block
from frontier.layers.attention import ATTENTION
from frontier.layers.ffn import FFN, linear
from frontier.layers.join import triton_join
from frontier.layers.launch import LAUNCH, Run
from frontier.layers.weights import Stack, pack, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe, parse_recipe
from frontier.record import Record
from frontier.runner import facts_of_now
from frontier.timelock import timing_window
from frontier.timing import time_in_turn

SLICES = (8192, 4096, 2048)
Way = Callable[[Tensor, Tensor], None]


def in_slices(run: Run, tokens: int) -> Way:
    return lambda x_BSD, out_BSD: block.by_rows(x_BSD, out_BSD, run, run, None, max(1, tokens // x_BSD.shape[1]))


def by_parts(stack: Stack, case: Case, recipe: Recipe, launch: str) -> Run:
    return LAUNCH[launch].wrap(lambda x_BSD: block.run_stack(x_BSD, stack, case, recipe), [])


def two_streams(stack: Stack, case: Case, recipe: Recipe) -> Run:
    side = torch.cuda.Stream()

    def run(x_BSD: Tensor) -> None:
        here, (first_BSD, second_BSD) = torch.cuda.current_stream(), x_BSD.chunk(2)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            block.run_stack(second_BSD, stack, case, recipe)
        block.run_stack(first_BSD, stack, case, recipe)
        here.wait_stream(side)

    return LAUNCH["graph"].wrap(run, [])


def sum_in_the_gemm(stack: Stack, case: Case, recipe: Recipe) -> Run:
    """Biases of the two GEMMs that add are left out: a probe of speed, told as the difference that they make."""

    def run(x_BSD: Tensor) -> None:
        B, S, D = x_BSD.shape
        x_ND = x_BSD.view(B * S, D)
        for layer in stack.layers:
            h_ND = triton_join(x_ND, None, layer.norm1, torch.float16)
            qkv_N3D = linear(h_ND, layer.projections[0])
            q, k, v = qkv_N3D.view(B, S, 3, case.heads, case.head_width).unbind(2)
            context_ND = ATTENTION[recipe.attention].attend(q, k, v, case.causal).reshape(B * S, D)
            torch.addmm(x_ND, context_ND, layer.out.weight_OI.t(), out_dtype=torch.float32, out=x_ND)
            h_ND = triton_join(x_ND, None, layer.norm2, torch.float16)
            hidden_NF = FFN["torch-ffn"].hidden(h_ND, layer.ffn_in)
            torch.addmm(x_ND, hidden_NF, layer.ffn_out.weight_OI.t(), out_dtype=torch.float32, out=x_ND)
        triton_join(x_ND, None, stack.final_norm, torch.float32, last=True)

    return LAUNCH["graph"].wrap(run, [])


def ways_of(case: Case, device: torch.device) -> dict[str, Way]:
    recipe = parse_recipe("fp16/packed/cudnn/triton-join", REFERENCE)
    stack = pack(seeded_state(case), case, recipe, device)
    flash, fused = (
        parse_recipe(f"fp16/packed/{words}/triton-join", REFERENCE) for words in ("flash", "cudnn/triton-ffn")
    )
    graph, whole = by_parts(stack, case, recipe, "graph"), case.batch_size * case.seq_len
    ways = {f"graph in slices of {tokens}": in_slices(graph, tokens) for tokens in SLICES}
    ways |= {
        f"eager in slices of {tokens}": in_slices(by_parts(stack, case, recipe, "eager"), tokens)
        for tokens in SLICES[:2]
    }
    ways["flash, graph"] = in_slices(by_parts(stack, case, flash, "graph"), whole)
    ways["gelu in the GEMM, graph"] = in_slices(by_parts(stack, case, fused, "graph"), whole)
    ways["two streams, graph"] = in_slices(two_streams(stack, case, recipe), whole)
    summed = sum_in_the_gemm(stack, case, recipe)
    return ways | {f"sum in the GEMM, graph in slices of {tokens}": in_slices(summed, tokens) for tokens in SLICES[:2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", default="8")
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line, behind those there")
    parser.add_argument("--commit", help="for a checkout without history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA card here, and this measures one")
    case, machine = Case.load(options.case), Machine.detect("cuda")
    device = torch.device(machine.device)
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device=device)
    out_BSD, first_BSD = torch.empty_like(x_BSD), None
    facts = facts_of_now(machine) | {"case": case.as_dict(), "flops": case.flops}
    facts |= {"commit": options.commit or facts["commit"]}
    found: dict[str, Record] = {}
    calls = {}
    with timing_window(machine), torch.inference_mode():
        for name, way in ways_of(case, device).items():
            found[name] = Record(kind="probe", recipe="fp16/packed/cudnn/triton-join", notes={"name": name}, **facts)
            try:
                way(x_BSD, out_BSD)
                torch.cuda.synchronize(device)
            except Exception as error:
                found[name] = dataclasses.replace(found[name], refused=str(error).splitlines()[0])
                continue
            first_BSD = out_BSD.clone() if first_BSD is None else first_BSD
            found[name].notes["from_first"] = float((out_BSD - first_BSD).abs().max())
            calls[name] = lambda way=way: way(x_BSD, torch.empty_like(x_BSD))
        for name, times in time_in_turn(calls, device, 4).items():
            found[name] = dataclasses.replace(found[name], call_ms=times.as_dict())
    with options.output.open("a") as file:
        for record in found.values():
            file.write(record.to_json() + "\n")
            print(record.notes, record.call_ms or record.refused, flush=True)


if __name__ == "__main__":
    main()
