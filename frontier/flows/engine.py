"""A plan made real: weights packed, slots allocated, lanes open; what passes are run on.

Takes    a plan and the stack's float32 weights.
Gives    timed passes, the two ceilings they are held against, measured peaks.
Knows nothing of run directories, records or the command line.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from frontier.data.protocols import Sink, Source
from frontier.data.watch import Watcher
from frontier.errors import DoesNotFit
from frontier.flows.chunked import ChunkedRows
from frontier.flows.whole import Fault, WholeRows, copy_work, input_is_finite, output_is_finite
from frontier.layers.block import matmul_precision
from frontier.layers.weights import State, pack
from frontier.machine import host_peak_bytes
from frontier.planner import Plan
from frontier.spans import Span
from frontier.stream.lanes import CudaLanes, HostLanes, Lanes, Work
from frontier.stream.pipeline import stream
from frontier.stream.ring import Slot, make_ring
from frontier.stream.trace import Event
from frontier.timing import GEMM_BYTES, gemm_tflops
from frontier.units import MIB, show_bytes

Watch = Callable[[Event], None]


class NotFinite(Exception):
    """A slice with a NaN or infinity came by and was not written; the runner finds out where it began."""

    def __init__(self, rows: Span, of_input: bool) -> None:
        super().__init__(rows, of_input)
        self.rows, self.of_input = rows, of_input


class Engine:
    """Holds what a plan planned, from `with` to its end.

    `folder`   where a flow may keep a file while it runs, or the name of one that may outlive it; by default the
               system's own for such

    Raises   DoesNotFit if the card or the host refuses what was planned; DataError if `folder` does.
    """

    def __init__(self, plan: Plan, state: State, valid_BS: Tensor | None = None, folder: Path | None = None) -> None:
        self.plan = plan
        self.device = torch.device(plan.machine.device)
        self._folder = folder or Path(tempfile.gettempdir())
        self.flow: WholeRows | ChunkedRows
        if plan.chunk is None:
            self.flow = WholeRows(plan, state, valid_BS)
        else:
            self.flow = ChunkedRows(plan, pack(state, plan.case, plan.recipe, self.device), valid_BS)
        self.slots: list[Slot] = []
        self.lanes: Lanes = HostLanes()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Engine":
        plan = self.plan
        with contextlib.ExitStack() as undo:
            undo.enter_context(matmul_precision(plan.recipe))
            if plan.machine.has_card:
                # Events and memory counts that name no device mean the current one, which cuda:1 is not by itself.
                undo.enter_context(torch.cuda.device(self.device))
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            undo.callback(self._let_go)
            with self.explained():
                self.slots = make_ring(plan.ring_depth, self.flow.slot_shape, self.device)
                self.flow.open(self._folder)
            if plan.machine.has_card:
                self.lanes = CudaLanes(self.device)  # waits for the default stream, which made weights and slots
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def _let_go(self) -> None:
        # A pass that was cut short (Ctrl-C while the card is timed) may have left work on the lanes.
        with contextlib.suppress(RuntimeError):  # a broken card repeats its error
            self.lanes.drain()
        for slot in self.slots:
            slot.release()
        self.slots = []
        self.flow.close()

    def run_pass(
        self,
        source: Source,
        sink: Sink,
        watcher: Watcher | None = None,
        watch: Watch = lambda event: None,
        *,
        work: Work | None = None,
        done_rows: Container[int] = (),
        poison: bool = False,
        allow_nonfinite: bool = False,
    ) -> float:
        """Carry the whole batch, less `done_rows`, through once; return its seconds, first read to last write.

        Raises   NotFinite if a slice is not finite (with `allow_nonfinite`: if its input was and its output is
                 not); DoesNotFit if memory ran out after all; whatever source or sink raise.
        """

        excused: set[int] = set()  # rows whose input was not finite, which was allowed
        flow: Any = self.flow  # each flow knows its own loads

        def read(load: Span, pinned_in: Tensor) -> None:
            flow.read(load, pinned_in, source, watcher)

        def write(load: Span, pinned_out: Tensor, pinned_note: Tensor) -> None:
            rows, finite_in = flow.rows_of(load), input_is_finite(pinned_note)
            if not finite_in:
                excused.update(range(*rows))
            if (not finite_in and not allow_nonfinite) or not (output_is_finite(pinned_note) or rows.start in excused):
                raise NotFinite(rows, of_input=not finite_in)
            flow.write(load, pinned_out, sink, watcher)

        began_s = time.perf_counter()
        with self.explained():
            stream(
                flow.loads(done_rows),
                self.slots,
                self.lanes,
                read=read,
                work=work or flow.work,
                write=write,
                lend=flow.lend,
                watch=watch,
                poison=poison,
            )
        return time.perf_counter() - began_s

    def time_road(self, source: Source, sink: Sink) -> float:
        """Seconds of a pass that only copies: transport alone."""
        return self.run_pass(source, sink, work=copy_work)

    def time_card(self) -> float:
        """Seconds of the same work on rows that already lie in the slots: the card alone."""
        began_s = time.perf_counter()
        stream_here = self.lanes.compute if isinstance(self.lanes, CudaLanes) else None
        with torch.cuda.stream(stream_here), self.explained():
            flow: Any = self.flow
            for turn, load in enumerate(flow.loads(())):
                slot = self.slots[turn % len(self.slots)].lent(load.up, load.down)
                flow.work(load, slot.device_in_BSD, slot.device_out_BSD, slot.device_note)
        self.lanes.drain()
        return time.perf_counter() - began_s

    def find_fault(self, row: int, source: Source) -> Fault | None:
        """Where a row stops being finite, if it does. After the stream has ended."""
        return self.flow.find_fault(row, source, self.slots[0], self.lanes)

    def measure_gemm_tflops(self) -> float | None:
        """The card's half-precision matmul rate in this very run, or None without a card or the room for it."""
        room = self.plan.allocator_bytes - torch.cuda.memory_allocated(self.device) if self.plan.machine.has_card else 0
        if room < GEMM_BYTES + 64 * MIB:
            return None
        return gemm_tflops(self.device)

    def peaks(self) -> dict[str, Any]:
        """Bytes at their highest, by the record's names: on the card since `with`, on the host since process start."""
        card = self.plan.machine.has_card
        return {
            "device_peak_bytes": torch.cuda.max_memory_reserved(self.device) if card else None,
            "device_allocated_peak_bytes": torch.cuda.max_memory_allocated(self.device) if card else None,
            "host_peak_bytes": host_peak_bytes(),
        }

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the allocator's out-of-memory into our refusal, which shows the plan beside what was held."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"the card ran out of memory: {show_bytes(torch.cuda.max_memory_allocated(self.device))} were "
                f"allocated, the plan has {show_bytes(self.plan.allocator_bytes)} besides the CUDA context",
                hint="another program may hold the rest of the card: lower --device-budget or --ring-depth",
            ) from error
