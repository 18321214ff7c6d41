"""What of a row under way outlives a kill: what its steps wrote, claimed as they go, looked at when it is taken up.

Takes    steps as they are written, the spool's named file, the output's file, what a journal claims.
Gives    a journal its parts; the step with which the row goes on that was under way, or why it begins anew.
Knows nothing of weights, kernels or the command line.
"""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from frontier.case import Case
from frontier.data.memory import bytes_of
from frontier.data.sinks import FileSink
from frontier.data.spool import PIECE_BYTES, FileSpool
from frontier.errors import FrontierError, ResumeError
from frontier.flows.steps import Step, Steps
from frontier.ledger import SPOOL
from frontier.rundir import RunDir
from frontier.spans import cut
from frontier.stream.journal import Journal, Part

log = logging.getLogger("frontier.parts")

SAMPLE_PARTS = 16  # that a resume hashes before it believes the rest


class Begun(NamedTuple):
    """With which step a row goes on, behind which claims; how many positions were read and written, and their cost."""

    step: Step
    claims: Sequence[Part]
    seen: dict[int, tuple[int, int]]
    flops: int


class Parts:
    """Of the row under way. Steps are told in order; `journal` and `begun` are set before the first."""

    journal: Journal
    begun: Step | None = None

    def __init__(self, steps: Steps, case: Case, spool: FileSpool, sink: FileSink) -> None:
        self._steps, self._case, self.spool, self.sink = steps, case, spool, sink
        self._at: tuple[int, int] | None = None

    def sync(self) -> None:
        """Bring all that was written to the disk."""
        self.spool.sync()
        self.sink.sync()

    def will_write(self, step: Step) -> None:
        """Wait, if the step is the first that may write over what claimed parts need, until all behind is claimed."""
        at = (step.row, 0 if self._case.causal else step.layer)
        if at != self._at:
            self.journal.settle()
            self._at = at

    def wrote(self, step: Step) -> None:
        """Claim what it wrote, unless that ends the row, which then is claimed itself."""
        if step.down_bytes and not (step.gives_output and step.stop == self._case.seq_len):
            self.spool.is_kept = True
            self.sink.keep_begun()
            self.journal.add(lambda: self._part(step))

    def take_up(self, claims: Sequence[Part], run_dir: RunDir, verify: bool) -> Begun:
        """Where the row of some claims goes on. A sample of what it needs is hashed, or all.

        Raises   ResumeError if it must begin anew.
        """
        # Without these as they were, a step's number or a place in the spool may mean another.
        if changed := {"cut", "source_sha256"}.intersection(run_dir.drifted):
            raise ResumeError(f"the {min(changed)} is another than before")
        if self.spool.is_new:
            raise ResumeError(f"its keys and values are not in {self.spool.name}, or not in that size")
        row, causal, steps = claims[0].row, self._case.causal, list(self._steps.of([claims[0].row]))
        wrote = [step for step in steps if step.down_bytes][: len(claims)]
        # A causal chunk is on the card alone until it leaves; others are on the disk whenever something is written.
        left = [step for step in wrote if step.does == "leave" or not causal]
        if [claim.step for claim in claims] != [step.number for step in wrote] or wrote[-1] is steps[-1]:
            raise ResumeError("the journal leaves out some of what was written")
        if not left:
            raise ResumeError("none of its chunks was done")
        before, step = steps[: left[-1].number + 1], steps[left[-1].number + 1]
        needed = [  # nothing was written over what the row will read again
            n
            for n, done in enumerate(wrote)
            if causal or done.layer == step.layer or (done.layer == step.layer - 1 and done.does == "leave")
        ]
        if not verify:  # the first keys are the first to be written over by what comes later
            keys = [n for n in needed if wrote[n].does != "leave"]
            needed = needed[:: max(1, len(needed) // SAMPLE_PARTS)] + needed[-1:] + keys[:1]
        for n in needed:
            if self._part(wrote[n]) != claims[n]:
                raise ResumeError(f"{wrote[n]} did not write what the journal says")
        num_in = max((done.stop for done in before if done.does == "enter" and done.layer == 0), default=0)
        num_out = max((done.stop for done in before if done.gives_output), default=0)
        share = sum(map(len, before)), sum(map(len, steps))
        flops = self._case.flops // self._case.batch_size * share[0] // share[1]
        return Begun(step, [claim for claim in claims if claim.step < step.number], {row: (num_in, num_out)}, flops)

    def close(self) -> None:
        """Claim all that was written; the journal reads the spool until then. Of a whole output it is not kept."""
        with suppress(FrontierError):  # the sink tells it too
            self.journal.close()
        self.spool.is_kept &= not self.sink.is_finished

    def _part(self, step: Step) -> Part:
        """What lies on the disk of what a step wrote."""
        found, buffer = hashlib.sha256(), torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for piece in cut(step.down_bytes, PIECE_BYTES):
            into = buffer[: len(piece)]
            if step.writes_at is not None:
                self.spool.fetch(step.writes_at + piece.start, into)
            else:
                position_bytes = self._case.row_bytes // self._case.seq_len
                self.sink.read_row(step.row, into, step.start * position_bytes + piece.start)
            found.update(bytes_of(into))
        return Part(step.row, step.number, found.hexdigest())


def keep_journal(parts: Parts | None, sink: FileSink, run_dir: RunDir, verify: bool) -> Begun | None:
    """Keep one from now on. Where the row goes on that an earlier start was at; that it begins anew is said."""
    claims, begun = run_dir.parts, None
    if claims:
        try:
            if parts is None:
                raise ResumeError("its keys and values do not wait in a file that is kept")
            begun = parts.take_up(claims, run_dir, verify)
            log.warning("row %d was under way and goes on with %s", claims[0].row, begun.step)
        except ResumeError as reason:
            log.warning("row %d was under way and begins anew: %s", claims[0].row, reason)
    if parts is None:
        with suppress(OSError):  # what an earlier start may have left
            (run_dir.path / SPOOL).unlink()
    journal = run_dir.journal(sink, sink.sync if parts is None else parts.sync, begun.claims if begun else ())
    sink.tell(journal)
    if parts is not None:
        parts.journal, parts.begun = journal, begun.step if begun else None
    return begun
