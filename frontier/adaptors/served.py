"""A program made ready for the drop-in: one recipe at one batch size, length and device, with its masks.

Takes    a program, rows, a mask where they lie.
Gives    the output, queued; a mask is looked at while the card already works.
Knows nothing of parameters, evidence or the script.

Letters  B rows, S positions, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from frontier.layers.program import Program
from frontier.recipe import Recipe
from frontier.spans import cut

Question = Callable[[], Tensor]  # gives one bool


class Served:
    """One program, its recipe, and the name under which its runs are told.

    A program that takes no masks where they lie runs as if all tokens were valid while a side stream looks at the
    mask, and again if that was wrong: the script passes an all-true mask at every call, and asking first would leave
    the card idle until the host has the answer. Remembering masks is wrong: another may lie at the same address, and
    those made in inference mode count no edits. After a wrong guess the next mask is asked for first.
    """

    __slots__ = ("_causal", "_expect_unmasked", "_oracle", "_program", "_takes_device_masks", "name", "recipe")

    def __init__(self, program: Program, recipe: Recipe, name: str, device: torch.device, causal: bool) -> None:
        self.recipe, self.name = recipe, name
        self._program, self._causal = program, causal
        self._takes_device_masks = getattr(program, "takes_device_masks", False)
        self._oracle = None if device.type == "cpu" or self._takes_device_masks else Oracle(device)
        self._expect_unmasked = True

    def run(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
        """Queue the stack on the current stream; `valid_BS` is bool on the device of `x_BSD`, or None."""
        if valid_BS is None:
            self._program(x_BSD, out_BSD)
        elif self._takes_device_masks:
            self._program(x_BSD, out_BSD, valid_BS.contiguous())
        else:
            self._run_masked(x_BSD, out_BSD, valid_BS)

    def _run_masked(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor) -> None:
        guessed = self._oracle is not None and self._expect_unmasked
        if self._oracle is not None:
            self._oracle.mark()
        if guessed:
            self._program(x_BSD, out_BSD)
        ask = _host_ask if self._oracle is None else self._oracle.ask
        all_valid = ask(valid_BS.all)
        # Under causal no valid token sees past itself, so tokens cut off at the end change no valid output, unless
        # they hold what 0 x NaN would spread.
        unmasked = all_valid or (self._causal and ask(lambda: _is_cut_off(valid_BS) & _is_tame(x_BSD)))
        self._expect_unmasked = unmasked
        if not unmasked:
            self._program(x_BSD, out_BSD, valid_BS.cpu())
        elif not guessed:
            self._program(x_BSD, out_BSD)
        if unmasked and not all_valid:
            out_BSD.masked_fill_(~valid_BS[..., None], 0)


class Oracle:
    """Answers questions about a mask from a side stream, while the current one works."""

    __slots__ = ("_answer", "_answered", "_marked", "_side")

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)
        self._marked, self._answered = torch.cuda.Event(), torch.cuda.Event()
        self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)

    def mark(self) -> None:
        """What is queued until here, the mask perhaps, comes before the answers."""
        self._marked.record()

    def ask(self, question: Question) -> bool:
        """The answer; waits for the marked point, and no longer."""
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._marked)
            self._answer.copy_(question(), non_blocking=True)
            self._answered.record()
        self._answered.synchronize()  # so the mask is read before its owner may free it
        return bool(self._answer)


def _is_cut_off(valid_BS: Tensor) -> Tensor:
    """Whether each row's invalid tokens are its last ones."""
    return (valid_BS[:, :-1] >= valid_BS[:, 1:]).all()


def _is_tame(x_BSD: Tensor) -> Tensor:
    """Whether all is finite and its squares can be summed; a NaN is below nothing."""
    return torch.stack(torch.aminmax(x_BSD)).abs().amax() < 1e15


def _host_ask(question: Question) -> bool:
    return bool(question())


def by_slices(program: Program, most_rows: int) -> Program:
    """The same program, called on `most_rows` rows at a time."""

    def sliced(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        for span in cut(len(x_BSD), most_rows):
            rows = span.as_slice()
            program(x_BSD[rows], out_BSD[rows], None if valid_BS is None else valid_BS[rows])

    sliced.takes_device_masks = getattr(program, "takes_device_masks", False)  # type: ignore[attr-defined]
    return sliced
