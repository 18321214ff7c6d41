"""The table of launches: how the many kernels of a stack are handed to the device.

Takes    a callable that computes some rows in place, and the weights that it reads.
Gives    a callable from rows to output, for rows of any shape.
Knows nothing of layers, recipes' other parts or masks.

Letters  B rows, S positions, D width.
"""

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frontier.case import Case
from frontier.errors import Unsupported
from frontier.layers.costs import MOST_GRAPHS, TILE_TOKENS
from frontier.layers.refusals import Refuses, is_installed, never
from frontier.machine import Machine
from frontier.recipe import Recipe

InPlace = Callable[[Tensor], None]
# From the first tensor to the second, both float32, perhaps the same memory; queued on the current stream.
Run = Callable[[Tensor, Tensor], None]

# Programs that `torch.compile` makes for one stack before another shape is refused: each takes seconds to minutes.
MOST_COMPILED = 32


class Launch(NamedTuple):
    """One way to launch: wraps the callable with its weights; and why it cannot serve a case here, or None.

    `traces`   the callable is traced, not called: what it must find set is set by whoever calls the wrapped one.
    """

    wrap: Callable[[InPlace, Iterable[Tensor]], Run]
    refuses: Refuses
    traces: bool = False


def eager(run: InPlace, weights: Iterable[Tensor] = ()) -> Run:
    """Kernel by kernel. The output buffer carries the residual stream, so no third copy of the rows exists."""

    def launched(x_BSD: Tensor, out_BSD: Tensor) -> None:
        if out_BSD.data_ptr() != x_BSD.data_ptr():
            out_BSD.copy_(x_BSD)
        run(out_BSD)

    return launched


class Graphs:
    """A CUDA graph for each shape, the `MOST_GRAPHS` last used kept.

    Memory   all graphs take their temporaries from one pool, which so grows to the largest, not to the sum: safe,
             since they run one after another and nothing in the pool outlives a replay. The rows lie outside it.
    Aliases  a graph works on rows of its own; the caller's are copied in and out, so no call changes another's.
    """

    def __init__(self, run: InPlace, weights: Iterable[Tensor] = ()) -> None:
        self._run = run
        self._graphs: OrderedDict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None
        self._turn = threading.Lock()

    def __call__(self, x_BSD: Tensor, out_BSD: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():  # by the caller, whose graph takes in these kernels
            eager(self._run)(x_BSD, out_BSD)
            return
        with self._turn:
            here = torch.cuda.current_stream(x_BSD.device)
            if self._stream is not None and self._stream != here:
                here.wait_stream(self._stream)  # the last call's replay may still use the rows and the pool
            self._stream = here
            if x_BSD.shape not in self._graphs:
                self._capture(x_BSD, here)
            self._graphs.move_to_end(x_BSD.shape)
            graph, rows_BSD = self._graphs[x_BSD.shape]
            rows_BSD.copy_(x_BSD)
            graph.replay()
            out_BSD.copy_(rows_BSD)

    def _capture(self, x_BSD: Tensor, here: torch.cuda.Stream) -> None:
        with torch.cuda.device(x_BSD.device):
            while len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.synchronize()
                self._graphs.popitem(last=False)[1][0].reset()
            rows_BSD = x_BSD.clone(memory_format=torch.contiguous_format)
            # A stream of its own, for cuBLAS keeps a workspace a stream: graphs of two stacks, replayed on two streams
            # at a time, would else write into one. What a first call makes (workspaces, kernels) is made before the
            # capture, which may make nothing.
            self._side = self._side or torch.cuda.Stream()
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):
                self._run(rows_BSD)
            here.wait_stream(self._side)
            # cuBLAS's workspace of this stream lies in common memory, where whoever drops all workspaces (Inductor does
            # before it records) frees it under the graph. Dropped here, it is made anew in the graph's own pool.
            torch.cuda.synchronize()
            drop_workspaces()
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # thread_local: other threads may pin memory meanwhile, which is no fault of this capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                self._run(rows_BSD)
            drop_workspaces()  # no eager call may take up the one in the pool
            self._graphs[x_BSD.shape] = graph, rows_BSD


def drop_workspaces() -> None:
    """Free cuBLAS's workspaces of all streams; whoever multiplies next makes its own. Nothing may be queued."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # which a build without CUDA lacks
    if drop is not None:
        drop()


def _compiled(mode: str) -> Callable[[InPlace, Iterable[Tensor]], Run]:
    def wrap(run: InPlace, weights: Iterable[Tensor]) -> Run:
        for weight in weights:
            torch._dynamo.mark_static_address(weight)  # else a CUDA graph copies every weight at every call

        def whole(x_BSD: Tensor) -> Tensor:
            out_BSD = x_BSD.clone()
            run(out_BSD)
            return out_BSD

        # Dynamo counts its recompiles by code object: a copy gives each stack a count of its own.
        own = FunctionType(whole.__code__.replace(), whole.__globals__, "whole", closure=whole.__closure__)
        # fullgraph: a break, or a shape too many, is an error instead of silently eager.
        compiled = torch.compile(own, mode=mode, fullgraph=True, dynamic=False)
        seen: set[torch.Size] = set()
        turn = threading.Lock()

        def launched(x_BSD: Tensor, out_BSD: Tensor) -> None:
            with turn:
                torch.compiler.cudagraph_mark_step_begin()
                if x_BSD.shape in seen:
                    out_BSD.copy_(compiled(x_BSD))
                    return
                if len(seen) == MOST_COMPILED:
                    raise Unsupported(
                        f"rows of shape {list(x_BSD.shape)} are the {MOST_COMPILED + 1}th shape to compile for",
                        hint="use launch eager or graph where shapes vary",
                    )
                with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED, accumulated_recompile_limit=1 << 20):
                    out_BSD.copy_(compiled(x_BSD))
                seen.add(x_BSD.shape)

        return launched

    return wrap


def _graph_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    return "a CUDA graph needs a card" if not machine.has_card else _too_long(case)


def _too_long(case: Case) -> str | None:
    if case.seq_len > TILE_TOKENS:
        return f"a row of {case.seq_len} positions keeps a device busy by itself, a launch gains up to {TILE_TOKENS}"
    return None


def _compile_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    ours = [word for word in (recipe.attention, recipe.join, recipe.ffn) if word in NOT_COMPILED]
    if ours:
        return f"torch.compile makes its own kernels of PyTorch's parts, `{ours[0]}` is none"
    if recipe.projection == "separate":
        return "torch.compile writes no GEMM into a part of a buffer, needs packed projections"
    if not machine.has_card and not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler on the CPU"
    if machine.has_card and not is_installed("triton"):
        return "torch.compile needs the package triton"
    return _too_long(case)


def _tuned_refuses(case: Case, recipe: Recipe, machine: Machine) -> str | None:
    return _compile_refuses(case, recipe, machine) if machine.has_card else f"{recipe.launch} needs a card"


NOT_COMPILED = ("fa4", "short", "scores", "triton-join", "triton-ffn")

LAUNCH: dict[str, Launch] = {
    "eager": Launch(eager, never),
    "graph": Launch(Graphs, _graph_refuses),
    "compile": Launch(_compiled("default"), _compile_refuses, traces=True),
    "compile-reduce-overhead": Launch(_compiled("reduce-overhead"), _tuned_refuses, traces=True),
    "compile-max-autotune": Launch(_compiled("max-autotune"), _tuned_refuses, traces=True),
}
