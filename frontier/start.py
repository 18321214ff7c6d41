"""From a command's options to a run: opens what was named, in the order that loses least if it is refused.

Takes    a plan, paths and choices.
Gives    a record.
Knows nothing of click.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from frontier.case import Case
from frontier.chooser import choose
from frontier.data.files import open_source
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
    case_file: str,
    input_path: str | None,
    input_tensor: str | None,
    weights: Path | None,
    mask_path: str | None,
    valid_BS: Tensor | None,
    output: str,
    overwrite: bool,
    quiet: bool,
    choices: Choices,
) -> Record:
    """Check every file against the case, then run.

    Order    inputs first, the output's space last: a refused run leaves everything as it was.
    Raises   DataError, CaseError or RunDirError before anything is computed.
    """
    case, threads = plan.case, min(8, plan.machine.cores)
    file_output = None if output in ("none", "memory") else output
    outputs, inputs = (file_output, choices.trace), (case_file, input_path, weights, mask_path)
    _refuse_same_file([path for path in outputs if path], [path for path in inputs if path])
    if choices.trace is not None:
        _refuse_trace(choices.trace, overwrite)
    with contextlib.ExitStack() as ending:
        source = None
        if input_path is not None:
            source = open_source(input_path, case, input_tensor, threads)
            ending.callback(source.close)
        state = None if weights is None else load_state(weights, case)
        kept = ending.enter_context(RunDir(run_dir, overwrite))
        for path in outputs:
            if path and kept.owns(path):
                raise DataError(
                    f"{path} is a file of the run directory {run_dir} itself", hint="name another file or --run-dir"
                )
        sink = _open_sink(output, case, overwrite, threads)
        progress = Progress(case.batch_size * choices.passes, case.row_bytes, quiet)
        ending.callback(progress.close)
        return run(
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


def _refuse_same_file(outputs: Sequence[str | Path], inputs: Sequence[str | Path]) -> None:
    """No run may write over what it reads, or write two things into one file, whatever the paths look like."""
    places = [os.path.realpath(path) for path in outputs]
    for turn, (path, place) in enumerate(zip(outputs, places, strict=True)):
        for other in [*inputs, *outputs[:turn]]:
            elsewhere = os.path.realpath(other)
            same = os.path.exists(place) and os.path.exists(elsewhere) and os.path.samefile(place, elsewhere)
            if same or elsewhere in (place, f"{place}.partial"):
                raise DataError(f"{path} would be written over {other}, which this run uses", hint="name another file")


def _refuse_trace(trace: Path, overwrite: bool) -> None:
    if os.path.lexists(trace) and not (overwrite and os.path.isfile(trace)):
        raise DataError(f"{trace} exists", hint="--overwrite replaces a file; or name another with --trace")
    folder = trace.absolute().parent
    if not os.path.isdir(folder):
        raise DataError(f"no folder `{folder}` for --trace", hint="make it, or name another file")
    partial = trace.with_name(f"{trace.name}.partial")
    try:
        partial.touch()
        partial.unlink()
    except OSError as reason:
        raise DataError(f"{trace} cannot be written: {reason.strerror}", hint="name another with --trace") from None


def _open_sink(output: str, case: Case, overwrite: bool, threads: int) -> Sink:
    if output == "none":
        return NullSink()
    if output == "memory":
        return MemorySink(case, threads)
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
        rule = f"rule |u-r| < {case.atol:g} or < {case.rtol:g} |r|"
        sentence = (
            f"seed {seed}: {'pass' if verdict.passes else 'FAIL'}, {verdict.failing:,} of {verdict.elements:,} "
            f"elements fail, largest budget fraction {verdict.budget:.3g} at row {verdict.row}, "
            f"position {verdict.position}, channel {verdict.channel} "
            f"({verdict.got:.6g}, reference {verdict.wanted:.6g}); {choice.recipe}, {case.seq_len:,} positions; "
            f"{rule}{'' if case.has_official_rule else ', NOT the official one'}"
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
