"""One run from start to record; the only file that knows all rooms.

Takes    a plan, a source, a sink, and what to watch and measure.
Gives    a record; a run directory for the referee.
Knows nothing of flags or printing.
"""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from frontier.data.files import FileSource
from frontier.data.generate import SeededSource
from frontier.data.masks import checked_mask
from frontier.data.pipes import PipeSource
from frontier.data.protocols import Sink, Source
from frontier.data.resident import ResidentSource
from frontier.data.sinks import FileSink, NullSink, place_of
from frontier.data.watch import Watcher
from frontier.errors import FrontierError, Interrupted, NonFinite, Unsupported
from frontier.flows.chunked import ChunkedRows
from frontier.flows.engine import Engine, NotFinite
from frontier.flows.parts import Begun, keep_journal
from frontier.flows.steps import Step
from frontier.layers.weights import State, checked_state, seeded_state
from frontier.ledger import SPOOL
from frontier.machine import Machine
from frontier.planner import Plan, host_total_bytes
from frontier.record import Record, commit, source_sha256, versions
from frontier.rundir import RunDir
from frontier.stream.trace import Event, Trace
from frontier.timelock import using_card


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a run does besides computing.

    passes      times the whole batch is carried through; each is timed
    resident    make or read the whole input in host memory first, outside the timed passes
    watch       rows whose input is hashed and whose output is kept for the referee
    ceilings    also time the card alone, after each pass, and the road alone as often, after the last
    poison      fill every slot with NaN before use, so that a skipped copy shows
    verify      hash all that a row under way has left, not a sample, before it is gone on with
    """

    passes: int = 1
    resident: bool = False
    watch: tuple[int, ...] = (0,)
    ceilings: bool = False
    poison: bool = False
    allow_nonfinite: bool = False
    trace: Path | None = None
    verify: bool = False


def run(
    plan: Plan,
    source: Source | None = None,
    sink: Sink | None = None,
    *,
    state: State | None = None,
    valid_BS: Tensor | None = None,
    choices: Choices = Choices(),  # frozen
    run_dir: RunDir | None = None,
    output: str = "none",
    listeners: Sequence[Callable[[Event], None]] = (),
) -> Record:
    """Carry out a plan and say how it went.

    Without a source the rows are seeded; without a sink they are dropped; without a state the weights are
    seeded. The sink is finished here, or abandoned if anything fails.

    Shapes   `valid_BS` is bool, true for a valid token; all true is no mask.

    Raises   NonFinite naming row, position and layer; Interrupted saying what is safe; DoesNotFit; DataError;
             InUse while somebody times on the device.
    """
    if choices.allow_nonfinite and plan.slice_rows > 1:
        # A slice is judged as a whole: a bad input row would excuse an overflow in its neighbour.
        raise Unsupported(
            f"an input that is not finite is let pass row by row; the plan has {plan.slice_rows} rows a slice",
            hint="plan with slice_rows=1",
        )
    sink = sink or NullSink()
    job = _Job(plan, source or SeededSource(plan.case, plan.machine.cores), sink, choices, listeners)
    try:
        with using_card(plan.machine):
            return job.carry_out(state, valid_BS, run_dir, output)
    except KeyboardInterrupt:
        done = len(job.pass_s)
        when = f"in pass {done + 1} of" if done < choices.passes else "after"
        hint = "nothing else was left behind but the run directory, which is marked incomplete"
        if run_dir is not None and isinstance(sink, FileSink):
            hint = (
                f"{run_dir.path} is marked incomplete; the same command with --run-dir {run_dir.path} --resume goes on"
            )
        raise Interrupted(f"stopped by request {when} {choices.passes}: {job.give_up()}", hint=hint) from None
    except BaseException:
        job.give_up()
        raise


class _Job:
    """One run's state: its times so far, its trace, what it reads and writes."""

    def __init__(
        self, plan: Plan, source: Source, sink: Sink, choices: Choices, listeners: Sequence[Callable[[Event], None]]
    ) -> None:
        self.plan, self.source, self.sink, self.choices, self.listeners = plan, source, sink, choices, listeners
        self.read_by = source.how if isinstance(source, FileSource) else None
        self.trace = Trace(keeps=choices.trace is not None)
        self.pass_s: list[float] = []
        self.card_s: list[float] = []
        self.begun_s = time.time()
        self.first_slice_s: float | None = None
        self.begun: Begun | None = None

    def watch(self, event: Event) -> None:
        self.trace(event)
        gives = not isinstance(event.span, Step) or event.span.gives_output
        if event.verb == "write" and gives and self.first_slice_s is None:
            self.first_slice_s = time.time() - self.begun_s
        for listener in self.listeners:
            listener(event)

    def give_up(self) -> str:
        """End what reads and writes; say what is safe."""
        with contextlib.suppress(FrontierError):  # an earlier error is on its way
            self.source.close()
        return self.sink.abandon()

    def carry_out(self, state: State | None, valid_BS: Tensor | None, run_dir: RunDir | None, output: str) -> Record:
        plan, case, choices = self.plan, self.plan.case, self.choices
        weights_kind = "seeded" if state is None else "file"
        state = seeded_state(case) if state is None else checked_state(state, case)
        valid_BS = None if valid_BS is None else checked_mask(valid_BS, case)
        facts = facts_of_now(plan.machine)
        if run_dir is not None:
            run_dir.begin(
                plan,
                state,
                source=self.source.describe(),
                output=place_of(self.sink.path) if isinstance(self.sink, FileSink) else output,
                weights_kind=weights_kind,
                valid_BS=valid_BS,
                watched_rows=len(choices.watch),
                **facts,
            )
        # A row is gone on with neither in a second pass, nor where its own input must be seen to excuse its output.
        once = choices.passes == 1 and not choices.allow_nonfinite and not isinstance(self.source, PipeSource)
        name = SPOOL if once and isinstance(self.sink, FileSink) else ""
        with (
            ThreadPoolExecutor(plan.machine.cores, "frontier-hash") as pool,
            Engine(plan, state, valid_BS, None if run_dir is None else run_dir.path / name) as engine,
        ):
            # Without a run directory nobody will ask for the rows: they are not hashed, and no memory is taken.
            watcher = Watcher(case, choices.watch if run_dir is not None else (), pool)
            if choices.resident:
                self.source = ResidentSource(self.source, case, plan.machine.cores)
            done_rows = self._take_up(run_dir, watcher, engine)
            self._carry_passes(engine, watcher, done_rows)
            self.sink.finish()
            peaks, done_flops = engine.peaks(), self.begun.flops if self.begun else 0
            road_s = [engine.time_road(self.source, NullSink()) for _ in self.card_s]
            record = Record(
                kind="resumed" if done_rows or self.begun else "run",
                **facts,
                case=case.as_dict(),
                recipe=str(plan.recipe),
                plan=plan.as_dict(),
                input=f"{self.source.describe()['kind']}, {'resident' if choices.resident else 'on the fly'}",
                output=output,
                flops=case.flops * (case.batch_size - len(done_rows)) // case.batch_size - done_flops,
                pass_s=tuple(self.pass_s),
                first_slice_s=self.first_slice_s,
                startup_s=self.begun_s - psutil.Process(os.getpid()).create_time(),
                busy_s={verb: seconds / choices.passes for verb, seconds in self.trace.busy_s().items()},
                card_s=tuple(self.card_s),
                road_s=tuple(road_s),
                gemm_tflops=engine.measure_gemm_tflops() if choices.ceilings else None,
                device_planned_bytes=plan.allocator_bytes if plan.machine.has_card else None,
                host_planned_bytes=host_total_bytes(plan),
                notes=self._notes(run_dir, done_rows),
                **peaks,
            )
            watched = watcher.save(run_dir.path) if run_dir is not None else []
        self.source.close()
        if run_dir is not None:
            run_dir.finish(watched, record)
        if choices.trace is not None:
            self.trace.save(choices.trace)
        return record

    def _take_up(self, run_dir: RunDir | None, watcher: Watcher, engine: Engine) -> frozenset[int]:
        """The rows that an earlier start has finished, seen by the watcher too; from now on a journal is kept."""
        if run_dir is None or not isinstance(self.sink, FileSink):
            return frozenset()
        parts = engine.flow.keep_parts(self.sink) if isinstance(engine.flow, ChunkedRows) else None
        self.begun = keep_journal(parts, self.sink, run_dir, self.choices.verify)
        seen = dict.fromkeys(self.sink.claimed, (self.plan.case.seq_len,) * 2) | (self.begun.seen if self.begun else {})
        watcher.recall(seen, self.source, self.sink.read_row)
        return frozenset(self.sink.claimed)

    def _notes(self, run_dir: RunDir | None, done_rows: frozenset[int]) -> dict[str, Any]:
        """How the input was read, if it was a file; what an earlier start had done, and what is not as it was then."""
        notes: dict[str, Any] = {} if self.read_by is None else {"read_by": self.read_by}
        if run_dir is not None and (done_rows or self.begun):
            notes["resumed"] = {"done_rows": len(done_rows), "drifted": run_dir.drifted}
            notes["resumed"] |= {"at": str(self.begun.step)} if self.begun else {}
        return notes

    def _carry_passes(self, engine: Engine, watcher: Watcher, done_rows: Container[int]) -> None:
        choices = self.choices
        for _ in range(choices.passes):
            try:
                seconds = engine.run_pass(
                    self.source,
                    self.sink,
                    watcher,
                    self.watch,
                    done_rows=done_rows,
                    poison=choices.poison,
                    allow_nonfinite=choices.allow_nonfinite,
                )
            except NotFinite as found:
                with engine.explained():
                    fault = _located(found, engine, self.source, self.sink.abandon())
                raise fault from None
            self.pass_s.append(seconds)
            if choices.ceilings:
                self.card_s.append(engine.time_card())


def facts_of_now(machine: Machine) -> dict[str, Any]:
    """What every record says of its making: command, versions, commit, date."""
    return {
        "command": shlex.join(["frontier" if sys.argv[0] == "-c" else Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine.name,
        "versions": versions() | _card_facts(machine),
        "commit": commit(),
        "source_sha256": source_sha256(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _card_facts(machine: Machine) -> dict[str, str]:
    facts = {"driver": machine.driver, "power limit": machine.power_limit_w and f"{machine.power_limit_w:.0f} W"}
    return {name: value for name, value in facts.items() if value}


def _located(found: NotFinite, engine: Engine, source: Source, safe: str) -> FrontierError:
    """Say where a number stopped being finite: in which row and position of the input, or after which layer."""
    plan = engine.plan
    if isinstance(source, PipeSource):
        what = "the input is not finite" if found.of_input else f"recipe {plan.recipe} overflows"
        return NonFinite(
            f"{what} in rows {found.rows}, which a pipe does not give again to look where; {safe}",
            hint="keep the input with --resident, or name a file, to be told the place",
        )
    for row in range(*found.rows):
        fault = engine.find_fault(row, source)
        if fault is None:
            continue
        valid_BS = engine.flow.valid_BS
        if fault.layer is None and found.of_input:
            hidden = valid_BS is not None and not bool(valid_BS[row, fault.position])
            return NonFinite(
                f"the input is not finite: row {row}, position {fault.position}{' (which the mask hides)' * hidden}, "
                f"channel {fault.channel} holds {fault.value}; {safe}",
                hint="mend the input (what the mask hides may as well be 0), or let it pass with --allow-nonfinite",
            )
        if fault.layer is not None:
            return NonFinite(
                f"recipe {plan.recipe} overflows: row {row} stops being finite in {fault.layer}, first at position "
                f"{fault.position}; {safe}",
                hint=_holding_recipe(plan),
            )
    rows = f"{found.rows.start}-{found.rows.stop - 1}"
    return NonFinite(
        f"a NaN or infinity came out of rows {rows} and did not come again when they were run once more; {safe}",
        hint="the pipeline or the card is at fault, not the numbers: run with --poison and --ring-depth 1",
    )


def _holding_recipe(plan: Plan) -> str:
    if plan.recipe.precision == "fp16":
        return "half precision ends at 65,504: --recipe fp32/packed/efficient holds up to 3.4e38"
    return f"the numbers overflow {plan.recipe.precision} itself: scale the weights or the input down"
