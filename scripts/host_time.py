#!/usr/bin/env python3
"""Where the host's time goes in a call of the drop-in class on a card, as a record: small cases wait for the host.

Takes    case names; a file for the outcomes.
Gives    one record of kind "probe" a case: medians in microseconds of a whole call through the class and of its
         parts on the host; of calls one behind another, between two events each, as the benchmark script times them.
Knows nothing of what the card does meanwhile.

    python scripts/host_time.py --output host.jsonl 1 2 3 4 12
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from frontier.adaptors import organizer
from frontier.case import Case
from frontier.machine import Machine
from frontier.record import Record
from frontier.runner import facts_of_now
from frontier.timelock import timing_window

CALLS, CALLS_IN_FLIGHT = 2_000, 50  # fewer than would fill the card's queue, where the host waits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["1", "2", "3", "4", "7", "12"])
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line, behind those there")
    parser.add_argument("--commit", help="for a checkout without history")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA card here, and this measures one")
    machine = Machine.detect("cuda")
    facts = facts_of_now(machine)
    facts |= {"commit": options.commit or facts["commit"]}
    with timing_window(machine), options.output.open("a") as file:
        for name in options.cases:
            case = Case.load(name)
            notes, recipe = host_us(*model_and_rows(case))
            notes = {"name": f"case {name}: microseconds of the host a call through the class, medians", **notes}
            record = Record(kind="probe", case=case.as_dict(), flops=case.flops, recipe=recipe, notes=notes, **facts)
            file.write(record.to_json() + "\n")
            print(name, notes, flush=True)


def model_and_rows(case: Case) -> tuple[organizer.UserOptimizedTransformer, Tensor, Tensor]:
    """The class, rows and their all-true mask, on the card. Made outside of inference mode, which counts no edits."""
    sizes = {"batch_size": case.batch_size, "seq_len": case.seq_len, "d_model": case.d_model}
    sizes |= {"num_heads": case.heads, "ffn_dim": case.ffn_dim, "num_layers": case.layers}
    model = organizer.UserOptimizedTransformer(SimpleNamespace(**sizes, causal=case.causal)).cuda().eval()
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device="cuda")
    return model, x_BSD, torch.ones(x_BSD.shape[:2], dtype=torch.bool, device="cuda")


@torch.inference_mode()
def host_us(model: organizer.UserOptimizedTransformer, x_BSD: Tensor, valid_BS: Tensor) -> tuple[dict[str, Any], str]:
    """The medians, and the recipe that ran."""
    out_BSD = model(x_BSD, valid_BS)
    (served,), watch = model._served.values(), model._watch
    assert watch is not None
    event = torch.cuda.Event(enable_timing=True)
    parts: dict[str, Callable[[], Any]] = {
        "drop_in_us": lambda: model(x_BSD, valid_BS),
        "program_us": lambda: served.run(x_BSD, out_BSD, valid_BS),
        "watch_us": watch.unchanged,
        "checks_us": lambda: organizer._why_plain(x_BSD, valid_BS),
        "empty_like_us": lambda: torch.empty_like(x_BSD),
        "event_us": event.record,
    }
    found = {name: round(median_us(part), 1) for name, part in parts.items()}
    for name in ("drop_in_us", "program_us"):
        found[f"between_events_{name}"] = round(between_events_us(parts[name]), 1)
    assert model.ran_last is not None
    return found, model.ran_last


def median_us(part: Callable[[], Any]) -> float:
    samples = []
    for i in range(CALLS):
        if i % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        part()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(samples)


def between_events_us(call: Callable[[], Any]) -> float:
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(CALLS)] for _ in range(2))
    torch.cuda.synchronize()
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))


if __name__ == "__main__":
    main()
