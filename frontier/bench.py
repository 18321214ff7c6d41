"""One case on one device: recipes built, called and timed there beside the baseline and the yardstick.

Takes    a case, a machine, recipes.
Gives    times of calls on rows that lie there, the first result's seconds, peak bytes; or why there are none.
Knows nothing of gates, records or which recipe is wanted.

Letters  B rows, S positions, D width.
"""

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frontier.case import FLOAT32_BYTES, Case
from frontier.errors import DoesNotFit
from frontier.judge.gate import compare_rows
from frontier.judge.reference import reference, slice_rows, yardstick
from frontier.layers.block import matmul_precision
from frontier.layers.costs import weight_bytes, workspace_bytes
from frontier.layers.launch import drop_workspaces
from frontier.layers.program import Program, make_program, refusal
from frontier.layers.weights import seeded_state
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe
from frontier.timing import Call, Times, noise_band, time_in_turn
from frontier.tuned import BASELINE, YARDSTICK
from frontier.units import show_bytes

AGAIN = f"{BASELINE} again"


class NoTimes(Exception):
    """Why a recipe was not timed: `outcome` is refused, out of memory or failed."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(f"{outcome}: {reason}" if outcome != "refused" else reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A recipe's calls and those taken in turn with them. Peak bytes: input, output, weights and all in between."""

    times: Times
    beside: dict[str, Times]
    first_result_s: float | None
    peak_bytes: int | None


class Bench:
    """Holds a case's weights, one input and the programs that others are timed beside, from `with` to its end.

    Raises   DoesNotFit if the case's own dense baseline does not fit the device budget.
    """

    def __init__(self, case: Case, machine: Machine, rounds: int, warm: bool = False) -> None:
        self.case, self.machine, self.rounds, self.warm = case, machine, rounds, warm
        self.device = torch.device(machine.device)
        needed = _baseline_bytes(case, self.device)
        if needed > machine.device_budget_bytes:
            raise DoesNotFit(
                f"the dense baseline of case {case.name} needs {show_bytes(needed)}, "
                f"the device budget is {show_bytes(machine.device_budget_bytes)}",
                hint="recipes are timed beside it: tune a case of fewer rows",
            )
        self.noise = 0.0
        self._kept: dict[str, Call] = {}
        self._caches: dict[Recipe | str, _Caches] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Bench":
        with contextlib.ExitStack() as undo:
            if self.machine.has_card:
                # Events and kernels that name no device mean the current one, which cuda:1 is not by itself.
                undo.enter_context(torch.cuda.device(self.device))
            self._folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="frontier-bench-")))
            undo.callback(self._let_go)
            case = self.case
            self.state = seeded_state(case)
            generator = torch.Generator(self.device).manual_seed(case.seed)
            self.x_BSD = torch.randn(
                case.batch_size, case.seq_len, case.d_model, device=self.device, generator=generator
            ).mul_(case.input_scale)
            self._kept[BASELINE] = baseline = self._baseline()
            twice: dict[str, Call] = {BASELINE: baseline, AGAIN: baseline}
            try:
                with torch.inference_mode():
                    one, again = time_in_turn(twice, self.device, 2 * self.rounds).values()
            except torch.OutOfMemoryError as error:
                raise DoesNotFit(
                    f"the card ran out of memory under the dense baseline of case {case.name}: {first_line(error)}",
                    hint="another program may hold the rest of the card",
                ) from None
            self.noise = noise_band(one, again)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *about: object) -> None:
        self._undo.close()

    def _let_go(self) -> None:
        self._kept.clear()
        self._caches.clear()
        self.state, self.x_BSD = {}, torch.empty(0)
        if "torch._dynamo" in sys.modules:  # it keeps the pools of compiled programs' CUDA graphs until told
            torch._dynamo.reset()
        self._sweep()

    def _sweep(self) -> None:
        gc.collect()
        if self.machine.has_card:
            with contextlib.suppress(RuntimeError):  # a broken card repeats its error; the first one is told
                torch.cuda.empty_cache()

    def keep(self, recipe: Recipe) -> None:
        """Build a recipe, to be timed beside each one that follows. A recipe that refuses or fails is not kept."""
        if str(recipe) in self._kept or refusal(self.case, recipe, self.machine) is not None:
            return
        with self.caches_of(recipe), torch.inference_mode():
            try:
                call = self._call(self._make(recipe))
                call()  # a compiler works at the first call: it must do so in the recipe's own caches
            except Exception:  # its own record says why; the others are timed without it
                return
            self._kept[str(recipe)] = call

    def keep_yardstick(self) -> str | None:
        """Build the compiled plain layers, to be timed beside each recipe that follows. None, or why they are not."""
        case, x_BSD = self.case, self.x_BSD
        held = len(x_BSD) * case.seq_len * (24 * case.d_model + 4 * case.ffn_dim)
        if held + _baseline_bytes(case, self.device) > self.machine.device_budget_bytes:
            return f"others would not fit beside its {show_bytes(held)}"
        try:
            layers = yardstick(self.state, case, x_BSD.device)
            with self.caches_of(YARDSTICK), torch.inference_mode():
                budget = compare_rows(layers(x_BSD), self._baseline()(), case.atol, case.rtol).budget
                _ = layers(x_BSD), layers(x_BSD)  # its graph is recorded now: no other recipe pays for it
                self._wait()
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        if budget > 10:  # it serves nobody and needs no gate
            return f"it computes something else, off by {budget:.3g} error budgets"
        self._kept[YARDSTICK] = lambda: layers(x_BSD)
        return None

    def measure(self, recipe: Recipe) -> Measured:
        """Build a recipe, call it for the first time, then time its calls in turn with all that is kept.

        Raises   NoTimes if it refuses, does not fit, or fails.
        """
        reason = refusal(self.case, recipe, self.machine)
        if reason is not None:
            raise NoTimes("refused", reason)
        needed = needed_bytes(self.case, recipe)
        if needed > self.machine.device_budget_bytes:
            budget = show_bytes(self.machine.device_budget_bytes)
            raise NoTimes("out of memory", f"it needs {show_bytes(needed)}, the device budget is {budget}")
        try:
            with self.caches_of(recipe):
                return self._measure(recipe)
        except torch.OutOfMemoryError as error:
            raise NoTimes("out of memory", first_line(error)) from None
        except Exception as error:  # a compiler or a kernel may fail in any way; the reason is kept and shown
            raise NoTimes("failed", f"{type(error).__name__}: {first_line(error)}") from None
        finally:
            self._sweep()

    @contextlib.contextmanager
    def caches_of(self, recipe: Recipe | str) -> Iterator[None]:
        """Compile caches that no other recipe fills or uses; whatever compiles the recipe again profits from them.

        Warm, they are the user's own: quick, but a first result then tells nothing of what a newcomer waits for.
        """
        if self.warm:
            yield
            return
        if recipe not in self._caches:
            self._caches[recipe] = _Caches(self._folder / f"{len(self._caches)}")
        with self._caches[recipe].used():
            yield

    def is_usable(self) -> bool:
        """Whether the device still answers: after an illegal access it serves this process no more."""
        try:
            return bool(torch.ones(1, device=self.device).sum() == 1)
        except RuntimeError:
            return False

    def _measure(self, recipe: Recipe) -> Measured:
        drop_workspaces()  # a capture drops those of others, which may not count as room that this recipe gave back
        held_bytes = torch.cuda.memory_allocated(self.device) if self.machine.has_card else 0
        began_s = time.perf_counter()
        call = self._call(self._make(recipe))
        with torch.inference_mode():  # as the benchmark script calls
            call()
            self._wait()
            first_result_s = None if self.warm else time.perf_counter() - began_s
            peak_bytes = self._peak_bytes(call, held_bytes)
            others = {name: other for name, other in self._kept.items() if name != str(recipe)}
            times = time_in_turn({**others, str(recipe): call}, self.device, self.rounds)
        own = times.pop(str(recipe))
        return Measured(times=own, beside=times, first_result_s=first_result_s, peak_bytes=peak_bytes)

    def _baseline(self) -> Callable[[], Tensor]:
        """The dense layer as the benchmark script has it: eager, TF32 on a card, an all-true mask that costs."""
        case, state = self.case, {name: tensor.to(self.device) for name, tensor in self.state.items()}
        valid_BS = torch.ones(case.batch_size, case.seq_len, dtype=torch.bool, device=self.device)
        recipe = replace(REFERENCE, precision="tf32") if self.machine.has_card else REFERENCE

        def call() -> Tensor:
            with matmul_precision(recipe):
                return reference(self.x_BSD, state, case, valid_BS)

        return call

    def _peak_bytes(self, call: Call, held_bytes: int) -> int | None:
        if not self.machine.has_card:
            return None  # the host's peak is of the whole process
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - held_bytes + self.case.input_bytes

    def _make(self, recipe: Recipe) -> Program:
        return make_program(self.state, self.case, recipe, self.device)

    def _call(self, program: Program) -> Call:
        # As a module does, each call returns an output of its own.
        return lambda: program(self.x_BSD, torch.empty_like(self.x_BSD))

    def _wait(self) -> None:
        if self.machine.has_card:
            torch.cuda.synchronize(self.device)


class _Caches:
    """Compile caches of one recipe, empty at first, on disk and in memory: no recipe profits from another's.

    They stay while the bench does: a Triton kernel that is let go of is unloaded, under whatever captured it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernels: dict[int, Any] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder}-inductor", "TRITON_CACHE_DIR": f"{self._folder}-triton"}
        before = {name: os.environ.get(name) for name in places}
        kernels = _triton_kernels()
        theirs = [kernel.device_caches for kernel in kernels]
        os.environ.update(places)
        for kernel in kernels:
            empty = type(kernel.device_caches)(kernel.device_caches.default_factory)
            kernel.device_caches = self._kernels.setdefault(id(kernel), empty)
        try:
            yield
        finally:
            for kernel, cache in zip(kernels, theirs, strict=True):
                kernel.device_caches = cache
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _triton_kernels() -> list[Any]:
    """This package's Triton kernels that are imported by now."""
    modules = [module for name, module in sys.modules.items() if name.startswith("frontier.layers.")]
    return [value for module in modules for value in vars(module).values() if hasattr(value, "device_caches")]


def needed_bytes(case: Case, recipe: Recipe) -> int:
    """Input, output, weights and what one layer holds for the whole batch."""
    held = weight_bytes(case, recipe) + sum(workspace_bytes(case, recipe, case.batch_size).values())
    return 2 * case.input_bytes + held


def _baseline_bytes(case: Case, device: torch.device) -> int:
    """Input, output, weights; for one slice of rows scores thrice (product, masked, softmaxed) and a layer's tokens."""
    rows = slice_rows(case, device)
    scores_bytes = 3 * rows * case.dense_scores_bytes // case.batch_size
    tokens_bytes = rows * case.seq_len * (8 * case.d_model + 2 * case.ffn_dim) * FLOAT32_BYTES
    return 2 * case.input_bytes + weight_bytes(case, REFERENCE) + scores_bytes + tokens_bytes


def first_line(error: BaseException) -> str:
    """Of what an error says, at most 300 letters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
