"""The whole stack as one kernel: its weights, its scratch, its launches.

Takes    float32 weights, a case, a recipe; then rows.
Gives    a program like any other recipe's.
Knows nothing of which cases it serves, slices or tuning.

Letters  B rows, S positions, D width, F feed-forward width, H heads, K head width, M positions of a tile.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers import stack_cut
from frontier.layers.cards import capability_of, on_device, stream_of
from frontier.layers.costs import stack_rows_per_launch
from frontier.layers.quick_launch import Queue, launcher_of
from frontier.layers.stack_cut import (
    Cut,
    Turn,
    at_once,
    constants_of,
    in_three,
    splits,
    splits_output_weights,
    splits_values,
    turns_of,
)
from frontier.layers.weights import State, working_dtype
from frontier.recipe import Recipe
from frontier.spans import cut

# A position's counters and a call's number are 32-bit; starting anew at 2^20 calls keeps every product in range.
CALLS_BEFORE_RESET = 1 << 20

SHAPES_KEPT = 4


def pack_weights(
    state: State,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    *,
    folds_scale: bool = True,
    splits_ffn: bool = False,
    splits_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """(weights as `dtype`, vectors in float32) as `stack_kernel` reads them; folded in float64, rounded once.

    A LayerNorm's gain goes into the rows of the weights behind it and its bias into their biases; the softmax
    scale, times log2(e), into q unless attention applies it itself; the biases of k and v as the kernel's first
    lines say. `splits_ffn`, `splits_output`: what rounding left of the feed-forward
    weights, or of the output projection's, lies behind them.
    """
    scale = case.head_width**-0.5 * math.log2(math.e) if folds_scale else 1.0
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for i in range(case.layers):

        def get(name: str, kind: str, layer: int = i) -> Tensor:
            tensor = state[f"layers.{layer}.{name}.{kind}"].to(device, torch.float64)
            return tensor.t() if tensor.ndim == 2 else tensor

        q, k, v, out = (get(f"attention.{part}_proj", "weight") for part in ("q", "k", "v", "out"))
        bq, bv, bout = (get(f"attention.{part}_proj", "bias") for part in ("q", "v", "out"))
        gain1, bias1, gain2, bias2 = (get(name, kind) for name in ("norm1", "norm2") for kind in ("weight", "bias"))
        first, last = get("ffn_in", "weight"), get("ffn_out", "weight")
        added, feed = [gain1[:, None] * v, out], [gain2[:, None] * first, last]
        halved = [*(feed if splits_ffn else ()), *(added[1:] if splits_output else ())]
        matrices += [gain1[:, None] * q * scale, gain1[:, None] * k, *added, *feed]
        matrices += [m - m.to(dtype).double() for m in halved]
        nothing = torch.zeros_like(bq)
        vectors += [(bq + bias1 @ q) * scale, nothing, nothing, bout + (bv + bias1 @ v) @ out]
        vectors += [get("ffn_out", "bias"), get("ffn_in", "bias") + bias2 @ first]
    vectors += [state[f"final_norm.{kind}"].to(device, torch.float64) for kind in ("weight", "bias")]
    return torch.cat([m.reshape(-1) for m in matrices]).to(dtype), torch.cat(vectors).float()


class _Turn:
    """One turn of a shape: its cut and compile-time arguments, what it reads, its scratch, its counters."""

    def __init__(
        self,
        program: "StackProgram",
        turn: Turn,
        B: int,
        S: int,
        masked: bool,
        first: "_Turn | None",
        stream: int | None,
    ) -> None:
        case, recipe, device = program.case, program.recipe, program.device
        parted = stack_cut.cut_of(case, recipe, B, S, capability_of(device), turn)
        if first is not None and recipe.fusion == "stack-at-once":
            parted = stack_cut.second_at_once(parted, first.cut)
        self.cut: Cut = parted
        self.constants = constants_of(
            case, recipe, parted, S, turn, masked=masked, on_card=device.type == "cuda",
            first_tiles=first.tiles if first else None,
        )  # fmt: skip
        self.tiles: int = self.constants["TILES"]
        self.programs = B * self.tiles
        self.published = torch.zeros(self.programs * case.layers, dtype=torch.int32, device=device)
        self.weights, self.vectors = program.packed[turn]
        row_elements = S * (4 if splits_values(recipe, turn) else 3) * case.d_model
        self.qkv = program.room(stream, turn, (case.layers if self.tiles > 1 else 1) * B * row_elements)
        self.layer_stride = B * row_elements

    @property
    def own(self) -> tuple[Tensor, ...]:
        """What a kernel takes of a turn, in its order."""
        return self.weights, self.vectors, self.qkv, self.published


class _Launch:
    """One launch: its kernel's own arguments and its number. Of one turn, or of both at once."""

    def __init__(self, S: int, turns: Sequence[_Turn], small: Tensor) -> None:
        self._turns, self._small = turns, small
        self._own = (*(tensor for turn in turns for tensor in turn.own), small)
        self._numbers: tuple[int, ...] = (S, *(turn.layer_stride for turn in turns))
        self._constants, self._options = turns[0].constants, turns[0].cut.options
        if len(turns) > 1:
            self._numbers += (turns[0].programs,)
            self._constants = at_once(turns[0].constants, turns[1].constants)
        self._grid = (sum(turn.programs for turn in turns), 1, 1)
        self._go: Queue | None = None
        self.calls = 0

    def restart(self) -> None:
        """Count calls from 0 again."""
        for turn in self._turns:
            turn.published.zero_()
        if len(self._turns) > 1:
            self._small.fill_(-1)
        self.calls = 0

    def start(self, rows: tuple[Tensor, ...], told: tuple[int, ...], stream: int, keep: bool) -> None:
        """Queue the kernel; from the second call on the compiled one itself. `told` is where rows lie.

        `keep`   the compiled kernel, for later calls
        """
        if self.calls >= CALLS_BEFORE_RESET:
            self.restart()
        if self._go is not None:
            self._go(told, self.calls, stream)
        else:
            from frontier.layers import stack_triton as kernels

            kernel = kernels.stack_kernel if len(self._turns) == 1 else kernels.stack_at_once_kernel
            own, numbers, constants = self._own, self._numbers, self._constants
            compiled = kernel[self._grid](*rows, *own, self.calls, *numbers, **constants, **self._options)
            if compiled is not None and keep:  # the interpreter gives none
                # Plain addresses: for tensors a launcher asks the driver where each lies, 10 us in all.
                places = [tensor.data_ptr() for tensor in own]
                self._go = launcher_of(compiled, self._grid, places, numbers, tuple(constants.values()))
        self.calls += 1


class _Scratch:
    """The turns of one shape on one stream, their launches, and what they share; `stream` is None for a capture's."""

    def __init__(self, program: "StackProgram", B: int, S: int, masked: bool, stream: int | None) -> None:
        self.turns: list[_Turn] = []
        for turn in turns_of(program.recipe):
            self.turns.append(_Turn(program, turn, B, S, masked, self.turns[0] if self.turns else None, stream))
        # No tile of any call has written yet; a flag of call 0 is 0 or 1 where both turns go at once.
        small = torch.full((self.turns[0].programs,), -1, dtype=torch.int32, device=program.device)
        together = [self.turns] if program.recipe.fusion == "stack-at-once" else [[turn] for turn in self.turns]
        self.launches = [_Launch(S, turns, small) for turns in together]


class StackProgram:
    """The stack in one launch, or two where small rows are done again, unless at once; masks may lie on the device.

    Order    launches of one shape on one stream follow each other; each stream has scratch of its own.
    """

    def __init__(self, state: State, case: Case, recipe: Recipe, device: torch.device) -> None:
        self.case, self.recipe, self.device = case, recipe, device
        # Key by key over many keys a mask costs half as much again: whoever calls may try without it first.
        self.takes_device_masks = case.seq_len <= 128
        self.packed = {
            turn: pack_weights(
                state,
                case,
                torch.float32 if in_three(recipe, turn)[0] else working_dtype(recipe),
                device,
                splits_ffn=splits(recipe, turn),
                splits_output=splits_output_weights(recipe, turn),
            )
            for turn in turns_of(recipe)
        }
        self._nobody = torch.ones(1, dtype=torch.bool, device=device)
        self._scratch: OrderedDict[tuple[int, int, bool, bool, int], _Scratch] = OrderedDict()
        self._rooms: WeakValueDictionary[tuple[int, Turn], Tensor] = WeakValueDictionary()  # gone with their last shape
        self._most_rows: dict[int, int] = {}  # of a launch, by length
        self._lock = threading.Lock()

    def __call__(self, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        """Queue the stack on the current stream. Shapes: B and S may differ from the case's."""
        if valid_BS is not None and valid_BS.is_cpu:
            valid_BS = None if bool(valid_BS.all()) else valid_BS.to(self.device)
        B, S, _ = x_BSD.shape
        most = self._most_rows.get(S)
        if most is None:
            most = self._most_rows[S] = stack_rows_per_launch(self.case, self.recipe, S)
        if most >= B:
            self._launch(B, S, x_BSD, out_BSD, valid_BS)
            return
        for span in cut(B, most):
            rows = span.as_slice()
            self._launch(len(span), S, x_BSD[rows], out_BSD[rows], None if valid_BS is None else valid_BS[rows])

    def room(self, stream: int | None, turn: Turn, elements: int) -> Tensor:
        """Memory for a turn's q, k and v, which all shapes of a stream share, as their launches follow each other.

        A larger shape that comes later takes its own; those before it keep theirs.
        """
        kept = None if stream is None else self._rooms.get((stream, turn))
        if kept is None or kept.numel() < elements:
            dtype = torch.float32 if in_three(self.recipe, turn)[1] else working_dtype(self.recipe)
            kept = torch.empty(elements, dtype=dtype, device=self.device)
            if stream is not None:
                self._rooms[stream, turn] = kept
        return kept

    def _launch(self, B: int, S: int, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
        masked = valid_BS is not None
        rows = (x_BSD, out_BSD, self._nobody if valid_BS is None else valid_BS)
        x_at, out_at, valid_at = told = (x_BSD.data_ptr(), out_BSD.data_ptr(), rows[2].data_ptr())
        with self._lock, on_device(self.device):
            # A replay repeats the call's number: a captured launch has counters of its own, cleared before it.
            stream, captured = stream_of(self.device)
            # A kernel compiled for addresses in sixteens reads sixteen bytes at once.
            key = (B, S, masked, (x_at | out_at | valid_at) % 16 > 0, stream)
            scratch = None if captured else self._scratch.get(key)
            if scratch is None:
                scratch = _Scratch(self, B, S, masked, None if captured else stream)
                if not captured:
                    self._scratch[key] = scratch
                    if len(self._scratch) > SHAPES_KEPT:
                        self._scratch.popitem(last=False)
            for launch in scratch.launches:
                launch.start(rows, told, stream, keep=not captured)
