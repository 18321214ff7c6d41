"""From a command's options to a run: opens what was named, in the order that loses least if it is refused.

Takes    a plan, paths and choices.
Gives    a record.
Knows nothing of click.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from frontier.case import Case
from frontier.chooser import choose
from frontier.data.files import open_source
from frontier.data.masks import open_mask
from frontier.data.protocols import Sink
from frontier.data.sinks import MemorySink, NpySink, NullSink
from frontier.errors import DataError
from frontier.layers.weights import load_state
from frontier.machine import Machine
from frontier.planner import Plan
from frontier.proxy import judge_seed, longest_length
from frontier.record import Record
from frontier.rundir import RunDir
from frontier.runner import Choices, facts_of_now, run
from frontier.stream.progress import Progress


def start(
    plan: Plan,
    run_dir: Path,
    *,
    input_path: str | None,
    input_tensor: str | None,
    weights: Path | None,
    mask: str | None,
    output: str,
    resident: bool,
    watch: tuple[int, ...],
    passes: int,
    ceilings: bool | None,
    overwrite: bool,
    trace: Path | None,
    poison: bool,
    allow_nonfinite: bool,
    quiet: bool,
) -> Record:
    """Check every file against the case, then run.

    Order    inputs first, the output's space last: a refused run leaves nothing behind.
    Raises   DataError, CaseError or RunDirError before anything is computed.
    """
    case, threads = plan.case, min(8, plan.machine.cores)
    with contextlib.ExitStack() as undo:
        source = None
        if input_path is not None:
            source = open_source(input_path, case, input_tensor, threads)
            undo.callback(source.close)
        state = None if weights is None else load_state(weights, case)
        valid_BS = None if mask is None else _partial_mask(mask, case)
        if trace is not None and not trace.resolve().parent.is_dir():
            raise DataError(f"no folder `{trace.resolve().parent}` for --trace", hint="make it, or name another file")
        kept = RunDir(run_dir, overwrite)
        sink = _open_sink(output, case, overwrite, threads)
        progress = Progress(case.batch_size * passes, case.row_bytes, quiet)
        undo.callback(progress.close)
        choices = Choices(
            passes=passes,
            resident=resident,
            watch=watch,
            ceilings=passes > 1 if ceilings is None else ceilings,
            poison=poison,
            allow_nonfinite=allow_nonfinite,
            trace=trace,
        )
        record = run(
            plan,
            source,
            sink,
            state=state,
            valid_BS=valid_BS,
            choices=choices,
            run_dir=kept,
            output="file" if isinstance(sink, NpySink) else output,
            listeners=(progress,),
        )
        undo.pop_all()
        progress.close()
        return record


def _partial_mask(path: str, case: Case) -> Tensor | None:
    """The mask, or None if every token is valid: an all-true mask is no mask and costs nothing."""
    valid_BS = open_mask(path, case)
    return None if bool(valid_BS.all()) else valid_BS


def _open_sink(output: str, case: Case, overwrite: bool, threads: int) -> Sink:
    if output == "none":
        return NullSink()
    if output == "memory":
        return MemorySink(case)
    return NpySink(output, case, overwrite, threads)


def proxy_records(
    case: Case, machine: Machine, recipe: str | None, seeds: int, *, given_length: bool, quiet: bool
) -> Iterator[Record]:
    """One record a seed, each judged on every element."""
    if not given_length:
        case = case.override(seq_len=longest_length(case, machine))
    choice = choose(case, machine, recipe)
    for seed in range(case.seed, case.seed + seeds):
        seeded = dataclasses.replace(case, seed=seed)
        progress = Progress(case.batch_size, case.row_bytes, quiet)
        verdict = judge_seed(seeded, machine, choice.recipe, progress)
        progress.close()
        sentence = (
            f"seed {seed}: {'pass' if verdict.passes else 'FAIL'}, {verdict.failing:,} of {verdict.elements:,} "
            f"elements fail, largest budget fraction {verdict.budget:.3f} at row {verdict.row}, "
            f"position {verdict.position}, channel {verdict.channel} "
            f"({verdict.got:.6g}, reference {verdict.wanted:.6g}); {choice.recipe}, {case.seq_len:,} positions"
        )
        yield Record(
            kind="proxy",
            **facts_of_now(machine),
            case=seeded.as_dict(),
            recipe=str(choice.recipe),
            output="memory",
            flops=case.flops,
            verdicts={"proxy": verdict.as_dict()},
            notes={"reference": "dense float32 without TF32, same device, every element", "sentence": sentence},
        )
