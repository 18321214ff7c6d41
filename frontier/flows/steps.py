"""What there is to do for rows that are cut into chunks, step by step, in order.

Takes    a plan with a chunk, perhaps a mask.
Gives    the steps of rows: what each brings up and down, and where that lies in the spool.
Knows nothing of tensors, weights or how a step is done.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from torch import Tensor

from frontier.case import FLOAT32_BYTES
from frontier.layers.costs import chunk_floats, keys_bytes, most_keys_per_call
from frontier.ledger import residuals_spooled
from frontier.planner import Plan
from frontier.spans import Span, cut

Does = Literal["keys", "enter", "meet", "leave"]


class Step(Span):
    """One trip of a chunked row, called by the positions that it brings: a chunk's, or a key chunk's that it meets.

    keys     make a chunk's keys and values in `layer`, for all who come later (only if rows are not causal)
    enter    make a chunk's q, k and v in `layer`, from its residual or out of the layer before; attend to itself
    meet     attend to the key chunk
    leave    end `layer` and give the residual away: to the spool, or behind the last norm to the sink

    What it reads from or writes to the spool is a place there, in bytes; None is no spool, or one on the card.
    """

    row: int
    layer: int
    does: Does
    chunk: Span
    tokens: int  # valid positions of what it brings
    number: int  # among the row's steps, from 0
    down_bytes: int  # that it writes
    up: int = 0
    down: int = 0
    input_floats: Tensor | None = None  # where its input lies once it is read, if in no slot
    after: int | None = None
    reads_at: int | None = None
    writes_at: int | None = None

    @property
    def brings_input(self) -> bool:
        """Whether what it brings comes from the source."""
        return self.up > 0 and self.reads_at is None

    @property
    def gives_output(self) -> bool:
        """Whether what it writes goes to the sink."""
        return self.does == "leave" and self.down > 0 and self.writes_at is None

    def __str__(self) -> str:
        met = f" {self.start}-{self.stop - 1}" if self.does == "meet" else ""
        return f"row {self.row} layer {self.layer} {self.chunk} {self.does}{met}"


class Steps:
    """The steps of a plan's rows. `valid_BS` is the whole batch's mask on the host, or None.

    Order    a causal chunk goes through all layers before the next begins: keys of a layer are needed by later
             chunks alone. Others go layer by layer, the residual spooled between; in a file it has two places, in
             turn, so that a chunk that a killed run left half-way finds what it began from.
    """

    def __init__(self, plan: Plan, valid_BS: Tensor | None) -> None:
        assert plan.chunk is not None
        self._case, self._recipe, self._valid_BS = plan.case, plan.recipe, valid_BS
        self._on_card, self._x_places = plan.spool == "card", residuals_spooled(plan.case, plan.spool)
        self._chunks = list(cut(plan.case.seq_len, plan.chunk))
        # Of dense attention a plan holds the scores of two chunks.
        dense = plan.recipe.attention == "dense"
        self._most_keys = plan.chunk if dense else most_keys_per_call(plan.case, plan.recipe)
        self.slot_shape = (min(plan.chunk, plan.case.seq_len), chunk_floats(plan.case, plan.recipe))

    def of(self, rows: Iterable[int], begun: Step | None = None) -> Iterator[Step]:
        """The steps of some rows; each waits for the write of what it reads. The row that goes on with `begun` comes
        first: the spool holds what it needs."""
        written: dict[int, int] = {}
        for turn, step in enumerate(self._numbered(rows, begun)):
            if step.reads_at is not None:
                step.after = written.get(step.reads_at)
                assert step.after is not None or (begun and begun.row == step.row), step  # an earlier start wrote it
            if step.writes_at is not None:
                written[step.writes_at] = turn
            yield step

    def _numbered(self, rows: Iterable[int], begun: Step | None) -> Iterator[Step]:
        for row in rows if begun is None else sorted(rows, key=lambda row: row != begun.row):
            for number, step in enumerate(self._steps_of(row)):
                step.number = number
                if begun is None or row != begun.row or number >= begun.number:
                    yield step

    def _steps_of(self, row: int) -> Iterator[Step]:
        counts = [self._count(row, chunk) for chunk in self._chunks]
        layers, last = range(self._case.layers), self._case.layers - 1
        order = [(layer, n) for n in range(len(counts)) for layer in layers]
        if not self._case.causal:
            order = [(layer, n) for layer in layers for n in range(len(counts))]
        for layer, n in order:
            if not self._case.causal and n == 0 and len(counts) > 1:
                yield from (self._step(row, layer, "keys", m, counts[m]) for m in range(len(counts)) if counts[m])
            if counts[n] or layer == 0:  # of an empty chunk the input is looked at
                yield self._step(row, layer, "enter", n, counts[n])
            if counts[n]:
                yield from (self._step(row, layer, "meet", n, tokens, met) for met, tokens in self._met_by(n, counts))
            if layer == last or (counts[n] and not self._case.causal):
                yield self._step(row, layer, "leave", n, counts[n])

    def _met_by(self, n: int, counts: list[int]) -> Iterator[tuple[Span, int]]:
        """The keys that a chunk meets, and how many of them are valid.

        On the card neighbours' keys lie side by side, so one call meets as many as it may hold: 120 calls of 65,536
        keys and as many merges are 15 then. Only the last of them may have left a gap, behind its valid ones.
        """
        met: Span | None = None
        tokens = 0
        for m in range(n if self._case.causal else len(counts)):
            if m == n or not counts[m]:
                continue
            near = self._on_card and met is not None and met.stop == self._chunks[m].start and tokens == len(met)
            if met is not None and near and tokens + counts[m] <= self._most_keys:
                met, tokens = Span(met.start, self._chunks[m].stop), tokens + counts[m]
                continue
            if met is not None:
                yield met, tokens
            met, tokens = self._chunks[m], counts[m]
        if met is not None:
            yield met, tokens

    def _step(self, row: int, layer: int, does: Does, n: int, tokens: int, met: Span | None = None) -> Step:
        case, causal, first, chunk = self._case, self._case.causal, layer == 0, self._chunks[n]
        brings = met or chunk
        step = Step(*brings)
        step.row, step.layer, step.does, step.chunk, step.tokens = row, layer, does, chunk, tokens
        spooled, is_last = not self._on_card and step.tokens > 0, layer == case.layers - 1
        kv_floats = -(-keys_bytes(case, self._recipe, step.tokens) // FLOAT32_BYTES)
        if does == "meet" and spooled:
            step.reads_at, step.up = self._kv_at(layer, brings), self._rows(kv_floats)
        elif does in ("keys", "enter") and first:
            step.up = self._rows(len(chunk) * case.d_model)
        elif does in ("keys", "enter") and spooled and not causal:
            step.reads_at, step.up = self._x_at(layer - 1, chunk), self._rows(step.tokens * case.d_model)
        down_floats = 0
        if does == "leave" and is_last:
            down_floats = len(chunk) * case.d_model
        elif does == "leave" and spooled:
            step.writes_at, down_floats = self._x_at(layer, chunk), step.tokens * case.d_model
        elif spooled and (does == "keys" or (does == "enter" and causal and chunk != self._chunks[-1])):
            step.writes_at, down_floats = self._kv_at(layer, chunk), kv_floats
        step.down, step.down_bytes = self._rows(down_floats), down_floats * FLOAT32_BYTES
        return step

    def floats_up(self, step: Step) -> int:
        """Float32 numbers that a step reads from the spool: keys and values, or a residual."""
        if step.does == "meet":
            return -(-keys_bytes(self._case, self._recipe, step.tokens) // FLOAT32_BYTES)
        return step.tokens * self._case.d_model

    def _count(self, row: int, chunk: Span) -> int:
        return len(chunk) if self._valid_BS is None else int(self._valid_BS[row, chunk.as_slice()].sum())

    def _rows(self, floats: int) -> int:
        """Rows of a slot that hold so many numbers."""
        return -(-floats // self.slot_shape[1])

    def _kv_at(self, layer: int, chunk: Span) -> int:
        case, recipe = self._case, self._recipe
        return keys_bytes(case, recipe, (layer if case.causal else 0) * case.seq_len + chunk.start)

    def _x_at(self, layer: int, chunk: Span) -> int:
        """Where the residual behind `layer` lies."""
        case, place = self._case, layer % self._x_places
        position_bytes = case.row_bytes // case.seq_len
        return keys_bytes(case, self._recipe, case.seq_len) + place * case.row_bytes + chunk.start * position_bytes
