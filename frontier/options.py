"""The command line's shared words: groups of options, sizes in bytes, errors into exit codes.

Takes    click.
Gives    decorators, parameter types, the group that turns our errors into text.
Knows nothing of what the commands do.
"""

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from frontier.case import Case
from frontier.errors import FrontierError
from frontier.ledger import SPOOL
from frontier.machine import Machine
from frontier.units import parse_bytes

Command = Callable[..., Any]


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.2 on
    """A size such as 12GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(value)


class Rows(click.ParamType):  # type: ignore[type-arg]
    """Row numbers such as 0,17; `none` is no row."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if value == "none":
            return ()
        try:
            return tuple(dict.fromkeys(int(part) for part in value.split(",")))
        except ValueError:
            self.fail(f"`{value}` is no list of rows; write it as 0,17 or none", param, ctx)


class Stop:
    """Remembers that Ctrl-C or SIGTERM came: an import that catches everything can swallow the interrupt itself."""

    came = False

    @classmethod
    def handle(cls, number: int, frame: object) -> None:
        cls.came = True
        raise KeyboardInterrupt

    @classmethod
    def heed(cls) -> None:
        """Raise again what was swallowed. To be called where imports are done and nothing has begun."""
        if cls.came:
            raise KeyboardInterrupt


class Door(click.Group):
    """Turns errors meant for users into `error:` and `hint:` lines on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FrontierError as error:
            click.echo(f"error: {error}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            self._end_stopped(ctx)
        except BrokenPipeError:
            # The reader of our stdout went away; nothing more can be said there.
            sys.stderr.close()
            ctx.exit(1)
        except OSError as reason:  # what the rooms below did not foresee: a full /dev/stdout, a disk that fails
            where = f" ({reason.filename})" if reason.filename else ""
            click.echo(f"error: {reason.strerror or reason}{where}", err=True)
            click.echo("hint: the system said so; what was written before is as it was", err=True)
            ctx.exit(2)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as fault:  # 1 is kept for a verdict, so nothing unforeseen may end as 1
            if Stop.came:  # half an import was left behind
                self._end_stopped(ctx)
            traceback.print_exc()
            click.echo(f"error: {fault}\nhint: frontier itself failed; please report the lines above", err=True)
            ctx.exit(2)

    @staticmethod
    def _end_stopped(ctx: click.Context) -> NoReturn:
        click.echo(
            "error: stopped by request; records that were written stay, and nothing else needs keeping", err=True
        )
        ctx.exit(130)


def _stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


case_options = _stacked(
    click.option("--case", "case_name", default="14", show_default=True, help="A shipped case, or a TOML file."),
    click.option("--batch-size", type=int, help="Rows, instead of the case's."),
    click.option("--seq-len", type=int, help="Positions of a row, instead of the case's."),
    click.option("--d-model", type=int, help="Width, instead of the case's."),
    click.option("--heads", type=int, help="Attention heads, instead of the case's."),
    click.option("--ffn-dim", type=int, help="Feed-forward width, instead of the case's."),
    click.option("--layers", type=int, help="Layers, instead of the case's."),
    click.option("--causal/--no-causal", default=None, help="Whether a position sees later ones."),
    click.option("--seed", type=int, help="Of weights and seeded rows."),
    click.option("--input-scale", type=float, help="What seeded values are multiplied by."),
)

machine_options = _stacked(
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i."),
    click.option("--device-budget", type=Bytes(), help="Card memory to hold at most; the allocator enforces it."),
    click.option("--pinned-budget", type=Bytes(), help="Page-locked host memory to hold at most."),
    click.option("--host-budget", type=Bytes(), help="Host memory to hold at most, pinned included."),
)

plan_options = _stacked(
    click.option("--recipe", help="Words such as fp16/packed/cudnn; parts left out are chosen."),
    click.option("--ring-depth", type=click.IntRange(1, 64), help="Slices in flight; 1 is the debug mode."),
    click.option(
        "--flow",
        type=click.Choice(["whole", "chunked"]),
        help="Rows whole or cut into chunks  [default: whole if it fits]",
    ),
    click.option("--chunk", type=click.IntRange(1), help="Positions of a chunk; cuts rows."),
    click.option(
        "--spool",
        type=click.Choice(["card", "pinned", "host", "file"]),
        help="Where a cut row's keys and values wait; --resume goes on inside the row only from a file; cuts rows.",
    ),
    click.option("--resident/--on-the-fly", default=False, help="Whole input in host memory first, or row by row."),
    click.option(
        "--output",
        default="none",
        show_default=True,
        help="FILE.npy or .safetensors, memory, none, or - for stdout (raw float32).",
    ),
    click.option("--watch", type=Rows(), help="Rows kept for the referee  [default: first and last]"),
)


def case_of(options: dict[str, Any]) -> Case:
    """Take the case options out of a command's arguments and make the case."""
    name = options.pop("case_name")
    keys = ("batch_size", "seq_len", "d_model", "heads", "ffn_dim", "layers", "causal", "seed", "input_scale")
    return Case.load(name).override(**{key: options.pop(key) for key in keys})


def machine_of(options: dict[str, Any]) -> Machine:
    """Take the machine options out of a command's arguments, look at the machine, hold the allocator to its budget."""
    machine = Machine.detect(
        options.pop("device"),
        device_budget_bytes=options.pop("device_budget"),
        pinned_budget_bytes=options.pop("pinned_budget"),
        host_budget_bytes=options.pop("host_budget"),
    )
    machine.limit_allocator()
    return machine


def plan_of(options: dict[str, Any]) -> tuple[Any, Any]:
    """Case, machine, recipe and plan of a command's options, which lose the words that were used."""
    from frontier.chooser import choose
    from frontier.data.masks import checked_mask, open_mask
    from frontier.errors import DoesNotFit, Unsupported
    from frontier.layers.costs import chunk_refusal
    from frontier.planner import Keeping
    from frontier.planner import plan as make_plan

    case, found = case_of(options), machine_of(options)
    if options["watch"] is None:
        options["watch"] = tuple(dict.fromkeys((0, case.batch_size - 1)))
    mask = options.pop("mask", None)
    options["valid_BS"] = None if mask is None else checked_mask(open_mask(mask, case), case)
    output = options["output"]
    keeping = Keeping(
        resident_input=options["resident"],
        drawn_input=not (options["resident"] or options.get("input_path")),
        output="none" if output == "-" else output if output in ("none", "memory") else "file",
        watch=options["watch"],
        masked=options["valid_BS"] is not None,
    )
    limits = {name: options.pop(name) for name in ("ring_depth", "flow", "chunk", "spool")}
    limits["spool"] = "disk" if limits["spool"] == "file" else limits["spool"]
    limits |= {"free_disk_bytes": free_disk_bytes(options), "spool_disk_bytes": sum(_spool_bytes(options))}
    limits |= {"slice_rows": 1 if options.get("allow_nonfinite") else None}
    wanted, passes = options.pop("recipe"), options.get("passes", 1)
    # What cannot fit is refused before a kernel's canary takes memory.
    cut = limits["chunk"] or (case.seq_len if limits["flow"] == "chunked" or limits["spool"] else None)
    hoped = choose(case, found, wanted, passes=passes, try_kernels=False, chunk=cut)
    try:
        planned = make_plan(case, found, hoped.recipe, keeping, **limits)
    except (DoesNotFit, Unsupported):
        if wanted is not None or chunk_refusal(hoped.recipe) is None:
            raise
        hoped = choose(case, found, None, passes=passes, try_kernels=False, chunk=case.seq_len)  # one that can cut
        planned = make_plan(case, found, hoped.recipe, keeping, **limits)
    for _ in range(3):  # a kernel that its canary refuses gives way to one that may need another cut
        choice = choose(case, found, wanted, passes=passes, chunk=planned.chunk)
        if choice.recipe == planned.recipe:
            return planned, choice
        planned = make_plan(case, found, choice.recipe, keeping, **limits)
    raise Unsupported(
        f"no recipe passes its canary in the cut that it needs: last {choice.recipe}, {planned.cut}",
        hint="name --recipe and --chunk",
    )


def free_disk_bytes(options: dict[str, Any]) -> int | None:
    """Free bytes where the output file would lie, with those that a run to be gone on with has taken; or None."""
    from frontier.errors import DataError

    if options["output"] in ("none", "memory", "-"):
        return None
    path = Path(options["output"])
    folder = path.resolve().parent
    if not path.name or not os.path.isdir(folder):
        raise DataError(
            f"no folder for the output `{options['output']}`", hint="make it, or name a .npy file, memory or none"
        )
    begun = [path.with_name(f"{path.name}.partial"), path] if options.get("resume") else []
    taken_bytes = [part.lstat().st_blocks * 512 for part in begun if part.is_file()]
    return shutil.disk_usage(folder).free + sum(taken_bytes[:1]) + _spool_bytes(options)[1]


def _spool_bytes(options: dict[str, Any]) -> tuple[int, int]:
    """Bytes free where keys and values of a row would lie in a file, where the run directory is, or will be; and those
    that an earlier run has taken there."""
    folder = Path(options.get("run_dir") or "runs").absolute()
    free_bytes = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free
    return free_bytes, (folder / SPOOL).lstat().st_blocks * 512 if (folder / SPOOL).is_file() else 0
