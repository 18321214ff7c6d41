"""The gate: a recipe's program against the contract's arithmetic on many trials, each chosen to catch it out.

Takes    a case, a machine, a recipe or what makes a program.
Gives    a `GateReport`: what each trial spent of the budget, and whether the recipe may be promoted.
Knows nothing of speed, evidence or flags.

Letters  B rows, S positions, D width.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from frontier.case import FLOAT32_BYTES, Case
from frontier.errors import DoesNotFit, Unsupported
from frontier.judge.gate import Verdict, compare_rows
from frontier.judge.promotion import INPUT_SCALES, PADDING, GateReport, Group, Trial
from frontier.judge.reference import reference, slice_rows
from frontier.judge.stress import FAMILIES, MASKS, normal_rows, padded_prefixes
from frontier.layers.block import matmul_precision
from frontier.layers.program import Program, make_program, refusal
from frontier.layers.weights import State, seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Precision, Recipe
from frontier.units import show_bytes

Maker = Callable[[State, Case, torch.device], Program]

TRIALS, SEEDS = 25, 2

# Programs by part compute masked rows one by one, so that 10,000 of them take seconds a trial.
MOST_MASKED_ROWS = 128

# The card is kept busy for some 2 ms before each call, longer than a program takes to queue its work: so work that
# was put on another stream runs beside the reading of the output, and what is not waited for is not there yet.
HEAD_START_CYCLES = 4_000_000

# Where exact float32 spends this much of the budget against float64, it is no truth to judge others by: rows of
# tiny variance beside a mean of 1 cost it 0.9 at d_model = 1,024, by rounding in LayerNorm's mean alone.
ILL_CONDITIONED_BUDGET = 0.1


def gate(
    case: Case,
    machine: Machine,
    recipe: Recipe | Maker,
    *,
    trials: int = TRIALS,
    seeds: int = SEEDS,
    input_scales: Sequence[float] = INPUT_SCALES,
    padding: Sequence[float] = PADDING,
    adversarial: bool = True,
    until_failure: bool = False,
    watch: Callable[[Group], None] = lambda group: None,
) -> GateReport:
    """Judge every element of every trial by the contract's rule; quick enough to be run before each timing.

    Trials   `trials` for each of `seeds` weights (the case's seed and those after it), each scale (times the
             case's own) and each padding, drawn as the benchmark script draws them: its own five come first. Then
             one for each adversarial family and mask. A cheap look: `trials=3, seeds=1, input_scales=(1,),
             padding=(0,), adversarial=False`.
    Honesty  buffers are the same in every trial and hold new content; the output is poisoned with NaN before the
             call and read on the caller's stream, which is not the default one, right after it, with no other
             wait; the input must come back unchanged; references have weights of their own. Trials without padding
             pass None and an all-true mask in turn.
    Masked   trials take the first 128 rows, unless the program takes masks on the device.
    `until_failure` ends after the first group that does not pass. `watch` hears of each group as it ends.

    Raises   Unsupported if the recipe refuses, DoesNotFit if the references do not fit the device's budget.
    """
    if isinstance(recipe, Recipe):
        reason = refusal(case, recipe, machine)
        if reason is not None:
            raise Unsupported(
                f"recipe {recipe} cannot serve case {case.name} on {machine.name}: {reason}",
                hint="name another with --recipe",
            )
    _check_fits(case, machine)
    made: list[Trial] = []
    with _caller(machine) as device:
        bench = _Bench(case, device, recipe, has_tf32(machine))
        plan = _drawn(trials, seeds, input_scales, padding) + (_stressed() if adversarial else [])
        for group in plan:
            judged = [bench.judge(asked) for asked in group]
            made += judged
            watch(Group(tuple(judged)))
            if until_failure and not Group(tuple(judged)).passes:
                break
    return GateReport(
        case=case,
        recipe=recipe if isinstance(recipe, Recipe) else None,
        machine=machine.name,
        trials=tuple(made),
        has_tf32=has_tf32(machine),
        masked_rows=bench.masked_rows,
    )


def has_tf32(machine: Machine) -> bool:
    """Whether the benchmark script's reference differs from the exact one here: TF32 came with Ampere."""
    return machine.capability is not None and machine.capability >= (8, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One trial to be made; `turn` counts weights from the case's seed on, `draw` inputs likewise."""

    scale: float = 1.0
    padding: float = 0.0
    stress: str | None = None
    turn: int = 0
    draw: int = 0


def _drawn(trials: int, seeds: int, scales: Sequence[float], padding: Sequence[float]) -> list[list[_Asked]]:
    return [
        [
            _Asked(scale=scale, padding=ratio, turn=turn, draw=turn * trials + number)
            for turn in range(seeds)
            for number in range(trials)
        ]
        for scale in scales
        for ratio in padding
    ]


def _stressed() -> list[list[_Asked]]:
    return [[_Asked(stress=name)] for name in (*FAMILIES, *MASKS)]


def _check_fits(case: Case, machine: Machine) -> None:
    """Raises DoesNotFit with the sum: input, its copy, output, its copy, two references (one in float64), a slice."""
    rows = slice_rows(case, torch.device(machine.device))
    scores_bytes = 2 * rows * case.dense_scores_bytes // case.batch_size
    slice_bytes = rows * case.seq_len * (8 * case.d_model + 2 * case.ffn_dim) * FLOAT32_BYTES
    needed_bytes = 7 * case.input_bytes + 2 * (scores_bytes + slice_bytes)
    if needed_bytes > machine.device_budget_bytes:
        raise DoesNotFit(
            f"judging case {case.name} needs {show_bytes(needed_bytes)}, of them {show_bytes(2 * scores_bytes)} for "
            f"dense scores; the budget is {show_bytes(machine.device_budget_bytes)}",
            hint="lower --seq-len or --batch-size; `frontier proxy` judges the streaming path of long sequences",
        )


@contextmanager
def _caller(machine: Machine) -> Iterator[torch.device]:
    """A stream of our own on a card: a program that queues its work on the default one is not waited for by luck."""
    device = torch.device(machine.device)
    with ExitStack() as ending:
        if device.type == "cuda":
            stream = _stream(device)
            torch.cuda.synchronize(device)
            ending.callback(stream.synchronize)
            ending.enter_context(torch.cuda.device(device))
            ending.enter_context(torch.cuda.stream(stream))
        yield device


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all gates of a process: what the allocator keeps for a stream serves that stream alone."""
    return torch.cuda.Stream(device)


class _Bench:
    """Buffers that every trial shares, programs and weights by turn, and the judging of one trial."""

    def __init__(self, case: Case, device: torch.device, recipe: Recipe | Maker, has_tf32: bool) -> None:
        self._case, self._device, self._recipe, self._has_tf32 = case, device, recipe, has_tf32
        self._shape = (case.batch_size, case.seq_len, case.d_model)
        self._x_BSD = torch.zeros(self._shape, device=device)
        self._out_BSD = torch.zeros(self._shape, device=device)
        self._programs: dict[int, tuple[Program, State]] = {}
        self._masks: dict[str, Tensor] = {}
        self.masked_rows = case.batch_size

    def judge(self, asked: _Asked) -> Trial:
        case = self._case
        program, state = self._program(asked.turn)
        on_device = getattr(program, "takes_device_masks", False)
        x_BSD, valid_BS = self._inputs(asked, on_device)
        given = valid_BS
        if valid_BS is None and asked.draw % 2:
            given = torch.ones(x_BSD.shape[:2], dtype=torch.bool, device=x_BSD.device if on_device else "cpu")
        got_BSD, faults = self._call(program, x_BSD, given)

        exact_BSD = self._reference(x_BSD, valid_BS, state, "fp32")
        judged_by, script, noise = "float32", None, None
        if self._has_tf32 and asked.stress is None:
            script_BSD = self._reference(x_BSD, valid_BS, state, "tf32")
            script, noise = self._compare(got_BSD, script_BSD), self._compare(exact_BSD, script_BSD)
            del script_BSD
        if asked.stress is not None:
            exact64 = {name: tensor.double() for name, tensor in state.items()}
            truth_BSD = self._reference(x_BSD, valid_BS, exact64, "fp32")
            if not self._compare(exact_BSD, truth_BSD).budget < ILL_CONDITIONED_BUDGET:
                judged_by, exact_BSD = "float64", truth_BSD
        exact = self._compare(got_BSD, exact_BSD)
        return Trial(
            scale=asked.scale,
            padding=asked.padding,
            stress=asked.stress,
            seed=case.seed + asked.turn,
            number=asked.draw,
            exact=exact,
            script=script,
            noise=noise,
            judged_by=judged_by,
            faults=faults(),
        )

    def _program(self, turn: int) -> tuple[Program, State]:
        """The program with the weights of a seed, called once on other rows in the shared buffers."""
        if turn not in self._programs:
            case = dataclasses.replace(self._case, seed=self._case.seed + turn)
            state = seeded_state(case)
            # The judge's own, before a program gets hold of them: what it spoils there spoils no reference.
            kept = {name: tensor.to(self._device, copy=True) for name, tensor in state.items()}
            make = self._recipe
            program = (
                make_program(state, case, make, self._device)
                if isinstance(make, Recipe)
                else make(state, case, self._device)
            )
            self._programs[turn] = program, kept
            self._x_BSD.copy_(normal_rows(self._shape, self._generator(-1)))
            program(self._x_BSD, self._out_BSD, None)
        return self._programs[turn]

    def _generator(self, draw: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._case.seed + draw + (1 << 32 if draw < 0 else 0))

    def _inputs(self, asked: _Asked, on_device: bool) -> tuple[Tensor, Tensor | None]:
        """Rows on the device and their mask, on the host unless the program takes it on the device."""
        generator = self._generator(asked.draw)
        x_BSD = normal_rows(self._shape, generator, asked.scale * self._case.input_scale)
        if asked.stress in FAMILIES:
            return FAMILIES[asked.stress](x_BSD), None
        if asked.stress in MASKS:
            draw_BS = torch.rand(self._shape[:2], generator=torch.Generator().manual_seed(self._case.seed))
            valid_BS = MASKS[asked.stress](draw_BS).to(self._device)  # invalid tokens keep what they hold
        elif asked.padding:
            valid_BS = padded_prefixes(self._shape, generator, asked.padding)
            x_BSD.masked_fill_(~valid_BS[..., None], 0)  # as the script does
        else:
            return x_BSD, None
        if not on_device:
            self.masked_rows = min(MOST_MASKED_ROWS, self._case.batch_size)
            x_BSD, valid_BS = x_BSD[: self.masked_rows], valid_BS[: self.masked_rows].cpu()
        return x_BSD, valid_BS

    def _call(
        self, program: Program, x_BSD: Tensor, valid_BS: Tensor | None
    ) -> tuple[Tensor, Callable[[], tuple[str, ...]]]:
        """The program's output as a caller would read it, and what to ask later: whether it changed its inputs."""
        given_BSD, out_BSD = self._x_BSD[: len(x_BSD)], self._out_BSD[: len(x_BSD)]
        given_BSD.copy_(x_BSD)
        out_BSD.fill_(torch.nan)
        given_BS = None
        if valid_BS is not None:
            # One buffer for all masks of a shape: a mask remembered by its address is another trial's.
            given_BS = self._masks.setdefault(str(valid_BS.shape), torch.empty_like(valid_BS)).copy_(valid_BS)
        if self._device.type == "cuda":
            torch.cuda._sleep(HEAD_START_CYCLES)
        program(given_BSD, out_BSD, given_BS)
        got_BSD = out_BSD.clone()  # at once, on the current stream, with no other wait: what came late is missing

        def faults() -> tuple[str, ...]:
            same = torch.equal(given_BSD.view(torch.int32), x_BSD.view(torch.int32))
            kept = valid_BS is None or given_BS is None or torch.equal(given_BS, valid_BS)
            return (() if same else ("the input was changed",)) + (() if kept else ("the mask was changed",))

        return got_BSD, faults

    def _reference(self, x_BSD: Tensor, valid_BS: Tensor | None, state: State, precision: Precision) -> Tensor:
        with matmul_precision(dataclasses.replace(REFERENCE, precision=precision)):
            return reference(x_BSD, state, self._case, valid_BS)

    def _compare(self, got_BSD: Tensor, wanted_BSD: Tensor) -> Verdict:
        return compare_rows(got_BSD, wanted_BSD, self._case.atol, self._case.rtol)
