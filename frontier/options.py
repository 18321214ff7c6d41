"""The command line's shared words: groups of options, sizes in bytes, errors into exit codes.

Takes    click.
Gives    decorators, parameter types, the group that turns our errors into text.
Knows nothing of what the commands do.
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import click

from frontier.case import Case
from frontier.errors import FrontierError
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
        click.echo("error: stopped by request; nothing had been started that needs keeping", err=True)
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
    click.option("--resident/--on-the-fly", default=False, help="Whole input in host memory first, or row by row."),
    click.option("--output", default="none", show_default=True, help="FILE.npy, memory or none."),
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
