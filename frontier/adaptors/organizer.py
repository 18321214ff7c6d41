"""The class and the function that the public benchmark script replaces, under its own names.

Takes    a configuration with the script's names; float32 rows `[batch_size, seq_len, d_model]`, a token mask.
Gives    the stack's output by the recipe that evidence chooses; in the plain way whatever it does not speed up.
Knows nothing of the script, files or timing.

Letters  B rows, S positions, D width.
"""

import functools
import itertools
import math
import sys
import threading
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from frontier.adaptors.plain import PlainStack
from frontier.adaptors.served import Served, by_slices
from frontier.adaptors.watch import Watch, why_unwatchable
from frontier.case import Case
from frontier.chooser import choose
from frontier.layers.costs import most_rows_per_call
from frontier.layers.program import make_program
from frontier.machine import Machine
from frontier.recipe import REFERENCE, Recipe

# Programs kept, one a shape and stream: each holds packed weights and perhaps a graph's buffers.
MOST_PROGRAMS = 8

# Launches a call may take: one of weights that have changed, two while another thread changes them.
MOST_ATTEMPTS = 3

# One launch at a time: programs own buffers, and PyTorch's TF32 switches, which they set and put back, are global.
_launching = threading.RLock()

Key = tuple[torch.Size, int, int | None]

# Asked before every launch: to find them through PyTorch's modules each time takes a microsecond.
_is_autocast, _level = torch.is_autocast_enabled, torch._C._functorch.maybe_current_level
_is_tracing, _modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack

_serial = itertools.count()
_alive: "WeakValueDictionary[int, UserOptimizedTransformer]" = WeakValueDictionary()


class UserOptimizedTransformer(PlainStack):
    """The stack under the script's name. Weights may be loaded, moved, edited or replaced at any time.

    `ran_last` names what the last call ran: a recipe, or `plain: ` and the reason; `runs` counts the calls of each.
    Changed settings (`causal`, heads, epsilons), hooks and a `forward` of a part's own are heeded too, the plain way;
    `Watch` names what is looked at after each launch, and the few edits that nobody can see. Recipes are chosen by
    evidence of weights as PyTorch initialises them: much larger ones may fail the rule in half precision.

    Raises   CaseError if the configuration's sizes fit no stack.
    """

    def __init__(self, config: Any) -> None:
        self._case = Case(
            name="drop-in", batch_size=config.batch_size, seq_len=config.seq_len, d_model=config.d_model,
            heads=config.num_heads, ffn_dim=config.ffn_dim, layers=config.num_layers, causal=config.causal,
        )  # fmt: skip
        super().__init__(config.d_model, config.num_heads, config.ffn_dim, config.num_layers, config.causal)
        self.config = config
        self._begin()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "config":  # the script's own class asks its configuration at each call
            super().__setattr__("causal", value.causal)

    def _begin(self) -> None:
        """What is never copied or pickled with a module: its programs, its number, its counts."""
        self._served: dict[Key, Served] = {}
        self._watch: Watch | None = None
        self._number = next(_serial)
        self.ran_last: str | None = None
        self.runs: dict[str, int] = {}
        _alive[self._number] = self

    def __getstate__(self) -> dict[str, Any]:
        fresh = ("_served", "_watch", "_number", "ran_last", "runs")
        return {name: value for name, value in self.__dict__.items() if name not in fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica._begin()
        return replica

    def forward(self, x: Tensor, valid_token_mask: Tensor | None = None) -> Tensor:
        """The stack's output, queued on the current stream; invalid tokens' outputs are 0.

        Shapes   `x` is [B, S, D], any B and S; `valid_token_mask` is bool [B, S], None when all are valid.
        """
        if torch.compiler.is_compiling():
            # Not is_exporting(): compilers before PyTorch 2.13 take it for True in every trace (seen: 2.11).
            if torch.is_grad_enabled() or torch.compiler._is_exporting_flag:
                return super().forward(x, valid_token_mask)
            # The compiler must see what the answer depends on: weights may be edited or replaced in its very graph.
            answer: Tensor = _whole_stack(x, valid_token_mask, list(self.parameters()), self._number)
            return answer
        return self._run(x, valid_token_mask)

    def _run(self, x_BSD: Tensor, valid_BS: Tensor | None) -> Tensor:
        reason = _why_plain(x_BSD, valid_BS)
        if reason is None and torch.is_grad_enabled() and (x_BSD.requires_grad or _any_requires_grad(self)):
            reason = "gradients are wanted"
        if reason is not None:
            return self._run_plain(x_BSD, valid_BS, reason)
        index = x_BSD.get_device()
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self._run(x_BSD, valid_BS)
        # A program's buffers belong to one stream: work of another would not wait for it.
        key = (x_BSD.shape, index, torch._C._cuda_getCurrentRawStream(index) if index >= 0 else None)
        with _launching:
            for _ in range(MOST_ATTEMPTS):
                served = self._served.get(key)
                if served is None and (reason := self._why_not_served(x_BSD)) is not None:
                    break
                out_BSD = torch.empty_like(x_BSD)
                served = self._queue(key, served, x_BSD, out_BSD, valid_BS)
                # Only now that the card works is it asked whether the launch was of today's weights.
                if self._watch is not None and self._watch.unchanged():
                    self._tell(served.name)
                    return out_BSD
                self._served.clear()
                self._watch = None
                del out_BSD, served
        return self._run_plain(x_BSD, valid_BS, reason or "its weights change while it runs")

    def _run_plain(self, x_BSD: Tensor, valid_BS: Tensor | None, reason: str) -> Tensor:
        out_BSD = super().forward(x_BSD, valid_BS)
        self._tell(f"plain: {reason}")
        return out_BSD

    def _tell(self, name: str) -> None:
        self.__dict__["ran_last"] = name  # nn.Module's own assignment takes a microsecond
        self.runs[name] = self.runs.get(name, 0) + 1

    def _queue(
        self, key: Key, served: Served | None, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None
    ) -> Served:
        """Run the key's program, made if need be; when memory runs out, once, that of the next admissible recipe."""
        try:
            served = served or self._serve(key, x_BSD)
            served.run(x_BSD, out_BSD, valid_BS)
            return served
        except torch.OutOfMemoryError:
            failed = served.recipe if served else _recipe(self._case_of(x_BSD), str(x_BSD.device))
            if failed == REFERENCE or (served and served.name != str(failed)):
                raise
        self._served.pop(key, None)
        served = None
        torch.cuda.empty_cache()
        served = self._serve(key, x_BSD, failed)
        shape = f"[{', '.join(map(str, x_BSD.shape))}]"
        print(f"frontier: {failed} ran out of memory at {shape}; now {served.recipe}", file=sys.stderr, flush=True)
        served.run(x_BSD, out_BSD, valid_BS)
        return served

    def _serve(self, key: Key, x_BSD: Tensor, failed: Recipe | None = None) -> Served:
        """Make and keep a program over today's weights, not of the recipe that failed; the oldest of many leaves."""
        # Buffers made in inference mode could not be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            case, device = self._case_of(x_BSD), x_BSD.device
            recipe = _recipe(case, str(device), failed)
            self._watch = self._watch or Watch(self)
            state = {name: parameter.detach() for name, parameter in self.named_parameters(remove_duplicate=False)}
            program = make_program(state, case, recipe, device)
            if case.batch_size > most_rows_per_call(case):
                program = by_slices(program, most_rows_per_call(case))
            if len(self._served) >= MOST_PROGRAMS:
                del self._served[next(iter(self._served))]
            name = str(recipe) if failed is None else f"{recipe} (as {failed} ran out of memory)"
            self._served[key] = Served(program, recipe, name, device, case.causal)
        return self._served[key]

    def _case_of(self, x_BSD: Tensor) -> Case:
        return replace(self._case, batch_size=len(x_BSD), seq_len=x_BSD.shape[1])

    def _why_not_served(self, x_BSD: Tensor) -> str | None:
        """Why no program can take these rows with the module as it is now, or None."""
        if x_BSD.shape[2] != self._case.d_model:
            return f"rows are {x_BSD.shape[2]} wide, the stack {self._case.d_model}"
        if not most_rows_per_call(self._case_of(x_BSD)):
            return f"one row of {x_BSD.shape[1]} positions has more than 2^31 elements"
        return why_unwatchable(self, self._case, x_BSD.device)


def copy_model_weights(baseline: nn.Module, optimized: nn.Module, strict: bool = True) -> None:
    """Load the baseline's weights; without `strict`, what does not fit by name is told and left out.

    Raises   RuntimeError, as `load_state_dict` does, naming what does not fit.
    """
    fit = optimized.load_state_dict(baseline.state_dict(), strict=strict)
    for kind, names in (("missing", fit.missing_keys), ("unexpected", fit.unexpected_keys)):
        if names:
            print(f"[warning] {kind} optimized keys: {names}")


def _why_plain(x_BSD: Tensor, valid_BS: Tensor | None) -> str | None:
    """Why this very call must take the plain way, or None; asked before every launch, so in a microsecond."""
    if type(x_BSD) is not Tensor or x_BSD.dtype is not torch.float32:
        return "rows are not a float32 tensor"
    if x_BSD.dim() != 3 or not x_BSD.is_contiguous() or not x_BSD.numel():
        return "rows are not a contiguous, filled [B, S, D]"
    device = x_BSD.device
    if valid_BS is not None and (
        valid_BS.dtype is not torch.bool or valid_BS.shape != x_BSD.shape[:2] or valid_BS.device != device
    ):
        return "the mask is not bool [B, S] on the device of the rows"
    kind = device.type
    if kind == "cuda":
        if torch._C._cuda_isCurrentStreamCapturing():
            return "a CUDA graph is being captured, which must read the parameters themselves"
    elif kind != "cpu":
        return f"no recipe knows {kind}"
    if _is_autocast(kind):
        return "autocast chooses the precision"
    if _level() is not None or _is_tracing() or _modes() or forward_ad._current_level >= 0:
        return "a transform looks at each operation"
    return None


def _any_requires_grad(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@functools.lru_cache(maxsize=64)
def _recipe(case: Case, device: str, failed: Recipe | None = None) -> Recipe:
    """The chooser's recipe for calls on rows that lie on the device; if one ran out of memory there, the next."""
    with torch.inference_mode(False), torch.no_grad():
        too_large = () if failed is None else (failed,)
        return choose(case, _machine(device), passes=math.inf, out_of_memory=too_large).recipe


@functools.lru_cache(maxsize=16)
def _machine(device: str) -> Machine:
    return Machine.detect(device)


@torch.library.custom_op("frontier::whole_stack", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _whole_stack(x_BSD: Tensor, valid_BS: Tensor | None, parameters: list[Tensor], number: int) -> Tensor:
    """The module of that number, as one operation of a compiled graph: a compiler must not look inside."""
    module = _alive[number]
    own = dict(module.named_parameters())
    if all(given is known for given, known in zip(parameters, own.values(), strict=True)):
        return module._run(x_BSD, valid_BS)
    # Weights that the graph computed, or that a caller put in the place of the module's own while it was traced.
    given = {f"stack.{name}": parameter for name, parameter in zip(own, parameters, strict=True)}
    answer: Tensor = torch.func.functional_call(_Plainly(module), given, (x_BSD, valid_BS))
    return answer


@_whole_stack.register_fake
def _(x_BSD: Tensor, valid_BS: Tensor | None, parameters: list[Tensor], number: int) -> Tensor:
    return x_BSD.new_empty(x_BSD.shape)


@_whole_stack.register_vmap
def _(
    info: Any, dims: Any, x_BSD: Tensor, valid_BS: Tensor | None, parameters: list[Tensor], number: int
) -> tuple[Tensor, int]:
    def at(tensor: Any, dim: int | None, i: int) -> Any:
        return tensor if dim is None else tensor.select(dim, i).contiguous()

    answers = [
        _whole_stack(
            at(x_BSD, dims[0], i), at(valid_BS, dims[1], i),
            [at(parameter, dim, i) for parameter, dim in zip(parameters, dims[2], strict=True)], number,
        )
        for i in range(info.batch_size)
    ]  # fmt: skip
    return torch.stack(answers), 0


class _Plainly(nn.Module):
    """A module's plain way, for other weights than its own."""

    def __init__(self, stack: UserOptimizedTransformer) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x_BSD: Tensor, valid_BS: Tensor | None) -> Tensor:
        return self.stack._run_plain(x_BSD, valid_BS, "other weights are given than the module's own")
