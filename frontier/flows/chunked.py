"""Rows that do not fit: one stream of steps, each a chunk that is begun, that meets the keys of another, or leaves.

Takes    a plan with a chunk, packed weights, perhaps a mask.
Gives    the steps of a batch in order, and what each verb does at a step.
Knows nothing of journals, records or the command line.

Letters  B rows, S positions, D width, N valid positions of a chunk, M of a key chunk.
"""

from collections.abc import Container, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from frontier.case import FLOAT32_BYTES
from frontier.data.protocols import Sink, Source
from frontier.data.sinks import FileSink, NullSink
from frontier.data.spool import FileSpool, MemorySpool, Spool
from frontier.data.watch import Watcher
from frontier.errors import DoesNotFit
from frontier.flows.ahead import InputsAhead
from frontier.flows.parts import Parts
from frontier.flows.steps import Step, Steps
from frontier.flows.whole import Fault, first_nonfinite
from frontier.layers.chunk import Chunk
from frontier.layers.weights import Stack, working_dtype
from frontier.ledger import inputs_ahead, spool_size
from frontier.planner import Plan
from frontier.spans import Span
from frontier.stream.lanes import Lanes
from frontier.stream.pinned import PinnedBuffer
from frontier.stream.pipeline import lend_slot, stream
from frontier.stream.ring import Slot

_SPOOL_THREADS = 8


class _Found(Exception):
    """Ends a search; never leaves this file."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class ChunkedRows:
    """A batch of rows cut into chunks. `valid_BS` is the whole batch's mask on the host, or None.

    Exact    invalid positions are left out of their chunk, as `block.forward` leaves them out of a row; a chunk
             without a valid one meets nobody. The only call that hides anything is a chunk's own, which is square.
    """

    def __init__(self, plan: Plan, stack: Stack, valid_BS: Tensor | None = None) -> None:
        assert plan.chunk is not None and plan.spool is not None
        self.plan, self.valid_BS, self._stack = plan, valid_BS, stack
        self._case, self._device = plan.case, torch.device(plan.machine.device)
        self._steps = Steps(plan, valid_BS)
        self.slot_shape: tuple[int, ...] = self._steps.slot_shape
        self._on_card = plan.spool == "card"
        self._spool: Spool | None = None
        self._pinned: PinnedBuffer | None = None
        self._held: Tensor | None = None  # what copies to and from the card take as it is
        self._parts: Parts | None = None
        self._inputs: InputsAhead | None = None

    def open(self, folder: Path) -> None:
        """Take what the plan says: the chunk's buffers and the spool. A spool in a file lies in `folder`, or is it."""
        plan, case = self.plan, self._case
        self._chunk = Chunk(self.slot_shape[0], self._stack, case, plan.recipe, self._device)
        num_bytes = spool_size(case, plan.recipe, plan.spool)
        if plan.spool == "card":
            layers, dtype = case.layers if case.causal else 1, working_dtype(plan.recipe)
            self._kv_LS2D = torch.empty(layers, case.seq_len, 2 * case.d_model, dtype=dtype, device=self._device)
            self._x_SD = torch.empty(0 if case.causal else case.seq_len, case.d_model, device=self._device)
        elif plan.spool == "pinned":
            floats = -(-num_bytes // FLOAT32_BYTES)
            try:
                self._pinned = PinnedBuffer(floats) if plan.machine.has_card else None
            except DoesNotFit as refusal:
                raise DoesNotFit(str(refusal), hint="take --spool host, or lower --pinned-budget") from None
            self._held = torch.zeros(floats) if self._pinned is None else self._pinned.tensor
        elif plan.spool == "host":
            self._spool = MemorySpool(num_bytes, min(_SPOOL_THREADS, plan.machine.cores))
        else:
            self._spool = FileSpool(folder, num_bytes, min(_SPOOL_THREADS, plan.machine.cores))
        count = inputs_ahead(case, plan.ring_depth, masked=self.valid_BS is not None)
        self._inputs = InputsAhead(count, self.slot_shape[0] * case.d_model, plan.machine.has_card)

    def close(self) -> None:
        self._held = None
        with ExitStack() as ending:  # each, whatever another raises; the last one first: the parts read the spool
            if self._pinned is not None:
                ending.callback(self._pinned.release)
                self._pinned = None
            for thing in (self._spool, self._parts, self._inputs):
                if thing is not None:
                    ending.callback(thing.close)

    def keep_parts(self, sink: FileSink) -> Parts | None:
        """Told from now on what `sink` and the spool are given, if that is a file with a name."""
        if isinstance(self._spool, FileSpool) and self._spool.name is not None:
            self._parts = Parts(self._steps, self._case, self._spool, sink)
        return self._parts

    def loads(self, done_rows: Container[int] = ()) -> Iterator[Step]:
        """The steps of every row that is not done yet."""
        begun = None if self._parts is None else self._parts.begun
        rows = [row for row in range(self._case.batch_size) if row not in done_rows]
        if self._inputs is not None:
            self._inputs.expect(step for step in self._steps.of(rows, begun) if step.brings_input)
        return self._steps.of(rows, begun)

    def rows_of(self, step: Step) -> Span:
        return Span(step.row, step.row + 1)

    def lend(self, step: Step, slot: Slot) -> Slot:
        """A slot's buffers for a step; an input, and in pinned memory all else, is carried from where it lies.

        Order    a place is written over only by work that is queued behind all that reads it.
        """
        lent, brought = lend_slot(step, slot), step.input_floats
        if self._held is not None and step.reads_at is not None:
            brought = self._held[step.reads_at // FLOAT32_BYTES :][: self._steps.floats_up(step)]
        if brought is not None:
            device_in = slot.device_in_BSD.view(-1)[: len(brought)].view(1, -1)
            lent = replace(lent, pinned_in_BSD=brought.view(1, -1), device_in_BSD=device_in)
        if self._held is not None and step.writes_at is not None:
            held, floats = self._held[step.writes_at // FLOAT32_BYTES :], step.down_bytes // FLOAT32_BYTES
            device_out = slot.device_out_BSD.view(-1)[:floats].view(1, -1)
            lent = replace(lent, pinned_out_BSD=held[:floats].view(1, -1), device_out_BSD=device_out)
        return lent

    def read(self, step: Step, pinned_in: Tensor, source: Source, watcher: Watcher | None) -> None:
        if step.reads_at is not None:
            is_keys = step.does == "meet"
            if self._spool is not None:
                places = (self._keys_in if is_keys else self._floats_of)(pinned_in, step.tokens)
                self._spool.fetch(step.reads_at, places)
        elif step.up:

            def read_input(step: Step, into: Tensor) -> None:
                rows, x_BSD = self.rows_of(step), self._floats_of(into, len(step))[None]
                source.read(rows, x_BSD, step.chunk)
                if watcher is not None and step.does == "enter":  # the first layer's keys are made of the same
                    watcher.saw_input(rows, x_BSD, step.chunk)

            if self._inputs is None:
                read_input(step, pinned_in)
            else:
                step.input_floats = self._inputs.take(read_input)[: len(step) * self._case.d_model]

    def work(self, step: Step, device_in: Tensor, device_out: Tensor, device_note: Tensor) -> None:
        """One step on the current lane; lowest and highest number of a chunk's input, and behind each layer."""
        chunk, causal = self._chunk, self._case.causal
        device_note.zero_()
        if step.does == "meet":
            chunk.meet(self._keys_of(step, device_in))
            return
        if step.does == "leave" or (step.does == "enter" and causal and step.layer):
            leaves = step.does == "leave"
            if step.tokens:
                chunk.end(step.layer if leaves else step.layer - 1, leads_on=not leaves)
                torch.aminmax(chunk.residual, out=(device_note[2], device_note[3]))
            if leaves:
                self._give(step, device_out)
        else:
            x_ND = self._residual_of(step, device_in, device_note)
            if step.tokens:
                chunk.begin(x_ND, step.layer)
        if step.does != "leave" and step.tokens:
            self._keep_keys(step, device_out)
        if step.does == "enter" and step.tokens:
            chunk.attend_own()

    def write(self, step: Step, pinned_out: Tensor, sink: Sink, watcher: Watcher | None) -> None:
        parts = self._parts if self._parts is not None and self._parts.sink is sink else None
        if parts is not None:
            parts.will_write(step)
        if step.writes_at is not None:
            is_keys = step.does != "leave"
            if self._spool is not None:
                places = (self._keys_in if is_keys else self._floats_of)(pinned_out, step.tokens)
                self._spool.keep(step.writes_at, places)
        elif step.down:
            rows, y_BSD = self.rows_of(step), self._floats_of(pinned_out, len(step))[None]
            sink.write(rows, y_BSD, step.chunk)
            if watcher is not None:
                watcher.saw_output(rows, y_BSD, step.chunk)
        if parts is not None:
            parts.wrote(step)

    def find_fault(self, row: int, source: Source, slot: Slot, lanes: Lanes) -> Fault | None:
        """Where a row stops being finite, if it does: its steps again, one at a time, each looked at behind it."""
        if isinstance(self._spool, FileSpool):
            self._spool.drop()  # what is claimed of it is written over
        if self._inputs is not None:
            self._inputs.close()  # looked into is one row, step by step
            self._inputs = None

        def work(step: Step, device_in: Tensor, device_out: Tensor, device_note: Tensor) -> None:
            self.work(step, device_in, device_out, device_note)
            reads = step.layer == 0 and step.does == "enter"
            ended = step.layer - (step.does == "enter")  # the layer that the step ended, if it did
            if reads:
                look(None, self._floats_of(device_in, len(step)), None, step)
            elif step.tokens and (step.does == "leave" or (step.does == "enter" and self._case.causal)):
                name = f"layer {ended}" + " or the norm behind it" * (ended == self._case.layers - 1)
                look(name, self._chunk.residual, self._kept(row, step.chunk), step)

        def look(layer: str | None, x_ND: Tensor, kept_N: Tensor | None, step: Step) -> None:
            place = first_nonfinite(x_ND)
            if place is not None:
                position = place[0] if kept_N is None else int(kept_N[place[0]])
                raise _Found(Fault(layer, step.start + position, place[1], float(x_ND[place])))

        def read(step: Step, pinned_in: Tensor) -> None:
            self.read(step, pinned_in, source, None)

        def write(step: Step, pinned_out: Tensor, pinned_note: Tensor) -> None:
            self.write(step, pinned_out, NullSink(), None)

        try:
            stream(self._steps.of([row]), [slot], lanes, read=read, work=work, write=write, lend=self.lend)
        except _Found as found:
            return found.fault
        return None

    def _floats_of(self, slot: Tensor, positions: int) -> Tensor:
        """The first numbers of a slot as so many positions."""
        return slot.view(-1)[: positions * self._case.d_model].view(positions, self._case.d_model)

    def _keys_in(self, slot: Tensor, positions: int) -> Tensor:
        """The same as keys and values, in the working precision."""
        width = 2 * self._case.d_model
        kv = slot.view(-1).view(working_dtype(self.plan.recipe))
        return kv[: positions * width].view(positions, width)

    def _kept(self, row: int, chunk: Span) -> Tensor | None:
        """The chunk's valid positions, None if they are all."""
        if self.valid_BS is None or bool((valid_C := self.valid_BS[row, chunk.as_slice()]).all()):
            return None
        return valid_C.nonzero().squeeze(1).to(self._device)

    def _residual_of(self, step: Step, device_in: Tensor, device_note: Tensor) -> Tensor:
        if step.layer:
            return self._x_SD[self._valid(step)] if self._on_card else self._floats_of(device_in, step.tokens)
        x_CD, kept_N = self._floats_of(device_in, len(step)), self._kept(step.row, step.chunk)
        torch.aminmax(x_CD, out=(device_note[0], device_note[1]))
        return x_CD if kept_N is None else x_CD[kept_N]

    def _valid(self, step: Step) -> slice:
        """Where on the card the chunk's valid positions lie, packed from its start on."""
        return slice(step.start, step.start + step.tokens)

    def _keys_of(self, step: Step, device_in: Tensor) -> Tensor:
        if not self._on_card:
            return self._keys_in(device_in, step.tokens)
        return self._kv_LS2D[step.layer if self._case.causal else 0, self._valid(step)]

    def _keep_keys(self, step: Step, device_out: Tensor) -> None:
        if step.writes_at is not None:
            self._keys_in(device_out, step.tokens).copy_(self._chunk.keys_values)
        elif self._on_card and (step.does == "keys" or self._case.causal):
            self._kv_LS2D[step.layer if self._case.causal else 0, self._valid(step)] = self._chunk.keys_values

    def _give(self, step: Step, device_out: Tensor) -> None:
        if step.layer < self._case.layers - 1:
            if self._on_card:
                self._x_SD[self._valid(step)] = self._chunk.residual
            else:
                self._floats_of(device_out, step.tokens).copy_(self._chunk.residual)
            return
        y_CD, kept_N = self._floats_of(device_out, len(step)), self._kept(step.row, step.chunk)
        if kept_N is None:
            y_CD.copy_(self._chunk.residual)
        else:
            y_CD.zero_()
            if step.tokens:
                y_CD[kept_N] = self._chunk.residual
