"""From a command's options to a run: opens what was named, in the order that loses least if it is refused.

Takes    a plan, paths and choices.
Gives    a record.
Knows nothing of click.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from frontier.case import Case
from frontier.chooser import choose
from frontier.data.files import open_source
from frontier.data.pipes import PipeSink, PipeSource
from frontier.data.protocols import Sink, Source
from frontier.data.sinks import FileSink, FinishedFile, MemorySink, NullSink, place_of
from frontier.errors import DataError, ResumeError
from frontier.flows.steps import Steps
from frontier.layers.weights import load_state
from frontier.machine import Machine
from frontier.planner import Plan
from frontier.proxy import judge_seed, longest_length
from frontier.record import Record
from frontier.rundir import JOURNAL, RunDir
from frontier.runner import Choices, facts_of_now, run
from frontier.stream.progress import Progress

log = logging.getLogger("frontier.start")

PIPE = "-"
NO_FILE = ("none", "memory", PIPE)

# Finished rows that a resume hashes before it believes the rest: 3 GB of case 14, some seconds.
SAMPLE_ROWS = 8


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
    resume: bool,
    quiet: bool,
    choices: Choices,
) -> Record:
    """Check every file against the case, then run, or go on with a run that was killed.

    Order    inputs first, the output's space last: a refused run leaves everything as it was.
    Raises   DataError, CaseError, RunDirError or ResumeError before anything is computed.
    """
    case, threads = plan.case, min(8, plan.machine.cores)
    file_output = None if output in NO_FILE else output
    outputs, inputs = (file_output, choices.trace), (case_file, input_path, weights, mask_path)
    _refuse_pipes(plan, input_path, output, resume, choices)
    _refuse_same_file([path for path in outputs if path], [path for path in inputs if path and path != PIPE])
    if choices.trace is not None:
        _refuse_trace(choices.trace, overwrite)
    with contextlib.ExitStack() as ending:
        source: Source | None = None
        if input_path is not None:
            source = PipeSource(0, case) if input_path == PIPE else open_source(input_path, case, input_tensor, threads)
            ending.callback(source.close)
        state = None if weights is None else load_state(weights, case)
        kept = ending.enter_context(RunDir(run_dir, overwrite, resume))
        for path in outputs:
            if path and kept.owns(path):
                raise DataError(
                    f"{path} is a file of the run directory {run_dir} itself", hint="name another file or --run-dir"
                )
        claimed = None
        if resume:
            _refuse_resume(output, choices)
            described = {"kind": "seeded"} if source is None else source.describe()
            claims = kept.claims(plan, described, place_of(output))
            finished = kept.finished_record()
            if finished is not None:
                _check_finished(run_dir, output, plan, claims.row_sha256 if claims else {}, choices, quiet)
                return finished
            if claims is not None and claims.broken_lines:
                lines = ", ".join(map(str, claims.broken_lines))
                log.warning("%s is damaged in line %s: what that claimed is made again", run_dir / JOURNAL, lines)
            claimed = None if claims is None else claims.row_sha256
            if claimed is not None and not claimed and not overwrite:
                _refuse_unclaimed(output, case)
        sink = _open_sink(output, case, overwrite, threads, claimed, bool(kept.parts))
        if isinstance(sink, FileSink):
            _check_claims(sink, case, choices, quiet)
            claimed = sink.claimed
        progress = _progress(plan, valid_BS, claimed or (), choices.passes, quiet)
        ending.callback(progress.close)
        return run(
            plan,
            source,
            sink,
            state=state,
            valid_BS=valid_BS,
            choices=choices,
            run_dir=kept,
            output="file" if isinstance(sink, FileSink) else output,
            listeners=(progress,),
        )


def _progress(plan: Plan, valid_BS: Tensor | None, done_rows: Collection[int], passes: int, quiet: bool) -> Progress:
    if plan.chunk is None:
        return Progress((plan.case.batch_size - len(done_rows)) * passes, plan.case.row_bytes, quiet)
    rows = (row for row in range(plan.case.batch_size) if row not in done_rows)
    return Progress(passes * sum(len(step) for step in Steps(plan, valid_BS).of(rows)), 0, quiet, "position")


def _refuse_resume(output: str, choices: Choices) -> None:
    if output in NO_FILE or choices.passes > 1:
        raise ResumeError(
            f"--resume finishes an output file, once; the output is {output}, the passes are {choices.passes}",
            hint="give the --output that the run was started with, and no --passes; without a file there is nothing "
            "to look at or to go on with",
        )


def _refuse_pipes(plan: Plan, input_path: str | None, output: str, resume: bool, choices: Choices) -> None:
    """A pipe passes each row once."""
    again = choices.passes > 1 or resume
    reads_again = again or choices.ceilings or (plan.chunk is not None and not plan.case.causal)
    if (output == PIPE and again) or (input_path == PIPE and (resume or (not choices.resident and reads_again))):
        raise DataError(
            "a pipe passes each row once: no --passes, --ceilings, --resume or chunks of rows that are not causal "
            "with `-`",
            hint="name files, or keep standard input with --resident",
        )


def _check_finished(
    run_dir: Path, output: str, plan: Plan, claimed: Mapping[int, str], choices: Choices, quiet: bool
) -> None:
    """That the output of a complete run still is what its journal says, as far as is looked. It is never mended.

    Raises   ResumeError naming the file and the first rows that are not.
    """
    try:
        with contextlib.closing(FinishedFile(output, plan.case, min(8, plan.machine.cores))) as file:
            if choices.verify:
                _check_all_claimed(output, plan.case, claimed)
            num_looked, changed = _look_at(file.row_hash, claimed, choices, quiet)
        if changed:
            raise ResumeError(_say_changed(output, changed, num_looked))
    except (DataError, ResumeError) as reason:
        hint = "put the file back as it was, or run again with --overwrite and without --resume"
        raise ResumeError(f"the run in {run_dir} is complete, and {reason}", hint=hint) from None
    told = f"{num_looked} of {plan.case.batch_size} rows in {output} were looked at and are as written"
    log.warning("the run in %s is complete: nothing is left to do; %s", run_dir, told)


def _check_claims(sink: FileSink, case: Case, choices: Choices, quiet: bool) -> None:
    """That finished rows still are what the journal says; those of a part may be made again, those of a file not."""
    try:
        if sink.is_whole:
            _check_all_claimed(sink.path.name, case, sink.claimed)
        num_looked, changed = _look_at(sink.row_hash, sink.claimed, choices, quiet)
        if changed and (sink.is_whole or not choices.verify):
            raise ResumeError(
                _say_changed(sink.path.name, changed, num_looked),
                hint="start anew with --overwrite" if sink.is_whole else "--verify looks at all and makes those again",
            )
    except BaseException:
        sink.abandon()
        raise
    if changed:
        sink.forget(changed)
        log.warning("%d finished rows are not what the journal says; they are made again", len(changed))


def _look_at(
    row_hash: Callable[[int], str], claimed: Mapping[int, str], choices: Choices, quiet: bool
) -> tuple[int, list[int]]:
    """Hash a sample of the claimed rows with the watched and the last, or all: how many, and those that changed."""
    rows, changed = sorted(claimed), []
    if not choices.verify:
        every = max(1, len(rows) // SAMPLE_ROWS)
        rows = sorted({*rows[::every], *rows[-1:], *claimed.keys() & set(choices.watch)})
    with contextlib.closing(Progress(len(rows), 0, quiet, "claimed row")) as progress:
        for row in rows:
            if row_hash(row) != claimed[row]:
                changed.append(row)
            progress.add(1)
    return len(rows), changed


def _check_all_claimed(output: str, case: Case, claimed: Collection[int]) -> None:
    """That no row of an output that is whole escapes being looked at."""
    if len(claimed) < case.batch_size:
        raise ResumeError(
            f"{output} is whole and the journal claims {len(claimed)} of its {case.batch_size} rows",
            hint="start anew with --overwrite",
        )


def _refuse_unclaimed(output: str, case: Case) -> None:
    """That a whole output whose journal lost all its claims is not taken for somebody else's file."""
    if os.path.lexists(f"{output}.partial"):
        return
    try:
        FinishedFile(output, case, 1).close()
    except (DataError, ResumeError):  # none, or another file: the sink says what it thinks of it
        return
    _check_all_claimed(output, case, ())


def _say_changed(output: str, changed: Sequence[int], num_looked: int) -> str:
    shown = ", ".join(map(str, changed[:SAMPLE_ROWS]))
    return f"{len(changed)} of {num_looked} finished rows looked at in {output} are not what the journal says: {shown}"


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


def _open_sink(
    output: str, case: Case, overwrite: bool, threads: int, claimed: Mapping[int, str] | None, begun: bool
) -> Sink:
    if output == "none":
        return NullSink()
    if output == PIPE:
        return PipeSink(1, case)
    if output == "memory":
        return MemorySink(case, threads)
    return FileSink(output, case, overwrite, threads, claimed, begun)


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
