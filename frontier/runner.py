"""One run from start to record; the only file that knows all rooms.

Takes    a plan, a source, a sink, and what to watch and measure.
Gives    a record; a run directory for the referee.
Knows nothing of flags or printing.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from frontier.data.generate import SeededSource
from frontier.data.protocols import Sink, Source
from frontier.data.resident import ResidentSource
from frontier.data.sinks import NullSink
from frontier.data.watch import Watcher
from frontier.errors import FrontierError, Interrupted, NonFinite
from frontier.flows.engine import Engine, NotFinite, host_pool
from frontier.flows.whole import first_nonfinite, where_it_began
from frontier.layers.weights import State, seeded_state
from frontier.machine import Machine
from frontier.planner import Plan, host_total_bytes
from frontier.record import Record, commit, source_sha256, versions
from frontier.rundir import RunDir
from frontier.stream.trace import Event, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a run does besides computing.

    passes      times the whole batch is carried through; each is timed
    resident    make or read the whole input in host memory first, outside the timed passes
    watch       rows whose input is hashed and whose output is kept for the referee
    ceilings    also time the card alone and the road alone, once after each pass
    poison      fill every slot with NaN before use, so that a skipped copy shows
    """

    passes: int = 1
    resident: bool = False
    watch: tuple[int, ...] = (0,)
    ceilings: bool = False
    poison: bool = False
    allow_nonfinite: bool = False
    trace: Path | None = None


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

    Raises   NonFinite naming row, position and layer; Interrupted saying what is safe; DoesNotFit; DataError.
    """
    case = plan.case
    weights_kind = "seeded" if state is None else "file"
    source = source or SeededSource(case, plan.machine.cores)
    sink = sink or NullSink()
    state = seeded_state(case) if state is None else state
    trace = Trace()
    first_write: list[float] = []

    def watch(event: Event) -> None:
        trace(event)
        if event.verb == "write" and not first_write:
            first_write.append(time.time())
        for listener in listeners:
            listener(event)

    begun_s = time.time()
    facts = facts_of_now(plan.machine)
    if run_dir is not None:
        run_dir.begin(plan, state, source=source.describe(), weights_kind=weights_kind, valid_BS=valid_BS, **facts)
    pass_s: list[float] = []
    card_s: list[float] = []
    road_s: list[float] = []
    with host_pool(plan.machine.cores) as pool, Engine(plan, state, valid_BS) as engine:
        watcher = Watcher(case, choices.watch, pool)
        try:
            if choices.resident:
                source = ResidentSource(source, case, plan.machine.cores)
            for _ in range(choices.passes):
                seconds = engine.run_pass(
                    source,
                    sink,
                    watcher,
                    watch,
                    poison=choices.poison,
                    allow_nonfinite=choices.allow_nonfinite,
                )
                pass_s.append(seconds)
                if choices.ceilings:
                    card_s.append(engine.time_card())
            sink.finish()
        except NotFinite as found:
            safe = sink.abandon()
            raise _located(found, engine, source, safe) from None
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped by request in pass {len(pass_s) + 1} of {choices.passes}: {sink.abandon()}",
                hint="nothing else was left behind but the run directory, which is marked incomplete",
            ) from None
        except BaseException:
            sink.abandon()
            raise
        peaks = engine.peaks()
        if choices.ceilings:
            road_s = [engine.time_road(source, NullSink()) for _ in range(choices.passes)]
        record = Record(
            kind="run",
            **facts,
            case=case.as_dict(),
            recipe=str(plan.recipe),
            plan=plan.as_dict(),
            input=f"{source.describe()['kind']}, {'resident' if choices.resident else 'on the fly'}",
            output=output,
            flops=case.flops,
            pass_s=tuple(pass_s),
            first_slice_s=first_write[0] - begun_s if first_write else None,
            startup_s=begun_s - psutil.Process(os.getpid()).create_time(),
            busy_s={verb: seconds / choices.passes for verb, seconds in trace.busy_s().items()},
            card_s=tuple(card_s),
            road_s=tuple(road_s),
            gemm_tflops=engine.measure_gemm_tflops() if choices.ceilings else None,
            device_planned_bytes=plan.allocator_bytes if plan.machine.has_card else None,
            host_planned_bytes=host_total_bytes(plan),
            **peaks,
        )
        watched = watcher.save(run_dir.path) if run_dir is not None else []
    source.close()
    if choices.trace is not None:
        trace.save(choices.trace)
    if run_dir is not None:
        run_dir.finish(watched, record)
    return record


def facts_of_now(machine: Machine) -> dict[str, Any]:
    """What every record says of its making: command, versions, commit, date."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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
    for row in range(*found.rows):
        x_SD = engine.upload_once(source, row)
        place = first_nonfinite(x_SD)
        if found.of_input and place is not None:
            return NonFinite(
                f"the input is not finite: row {row}, position {place[0]}, channel {place[1]} holds "
                f"{float(x_SD[place])}; {safe}",
                hint="mend the input, or pass it on as it is with --allow-nonfinite",
            )
        if place is None:
            valid_S = None if engine.flow.valid_BS is None else engine.flow.valid_BS[row]
            began = where_it_began(x_SD, engine.flow.stack, plan, valid_S)
            if began is not None:
                return NonFinite(
                    f"recipe {plan.recipe} overflows: row {row} stops being finite in {began[0]}, first at position "
                    f"{began[1]}; {safe}",
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
