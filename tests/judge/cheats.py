"""Programs that seem to compute, each wrong in one way that a careless judge lets pass; and one that is honest.

Each is what makes a program of a state, a case and a device, as the gate wants it.
"""

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from frontier.case import Case
from frontier.layers.program import Program, make_program
from frontier.layers.weights import State
from frontier.machine import Machine
from frontier.recipe import REFERENCE

Maker = Callable[[State, Case, torch.device], Program]
CPU = Machine.detect("cpu")


def case_of(**sizes: object) -> Case:
    shape = {"batch_size": 3, "seq_len": 20, "d_model": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
    return Case(**{"name": "tiny", **shape, **sizes})  # type: ignore[arg-type]


def honest(state: State, case: Case, device: torch.device) -> Program:
    return make_program(state, case, REFERENCE, device)


def cheat(lie: Callable[[Program, Tensor, Tensor, Tensor | None], None]) -> Maker:
    """A maker of programs that call `lie` with an honest program to make use of."""

    def make(state: State, case: Case, device: torch.device) -> Program:
        true = honest(state, case, device)
        return lambda x_BSD, out_BSD, valid_BS=None: lie(true, x_BSD, out_BSD, valid_BS)

    return make


def remembering(key_of: Callable[[Tensor, Tensor, Tensor | None], object]) -> Maker:
    """Programs that compute once for each key."""

    def make(state: State, case: Case, device: torch.device) -> Program:
        true, known = honest(state, case, device), {}

        def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
            key = (x_BSD.shape, key_of(x_BSD, out_BSD, valid_BS))
            if key not in known:
                true(x_BSD, out_BSD, valid_BS)
                known[key] = out_BSD.clone()
            out_BSD.copy_(known[key])

        return program

    return make


def stale(state: State, case: Case, device: torch.device) -> Program:
    true, last = honest(state, case, device), []

    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        true(x_BSD, out_BSD, valid_BS)
        last.append(out_BSD.clone())
        if len(last) > 1 and last[-2].shape == out_BSD.shape:
            out_BSD.copy_(last[-2])

    return program


def weights_spoilt_when_made(state: State, case: Case, device: torch.device) -> Program:
    for name, tensor in state.items():
        if "ffn_out" in name or "out_proj" in name:
            tensor.zero_()  # two thirds of the stack gone: right, if the reference has the same weights
    return honest(state, case, device)


def weights_spoilt_when_called(state: State, case: Case, device: torch.device) -> Program:
    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        weights_spoilt_when_made(state, case, device)(x_BSD, out_BSD, valid_BS)

    return program


def masks_by_address(state: State, case: Case, device: torch.device) -> Program:
    true, known = honest(state, case, device), {}

    def program(x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None = None) -> None:
        if valid_BS is not None:
            valid_BS = known.setdefault((valid_BS.data_ptr(), valid_BS.shape), valid_BS.clone())
        true(x_BSD, out_BSD, valid_BS)

    return program


def _late(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    given_BSD, answer_BSD = x_BSD.clone(), torch.empty_like(out_BSD)

    def work() -> None:
        time.sleep(0.02)
        true(given_BSD, answer_BSD, valid_BS)
        out_BSD.copy_(answer_BSD)

    threading.Thread(target=work).start()


def _half(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    rows = len(x_BSD) // 2
    true(x_BSD[:rows], out_BSD[:rows], None if valid_BS is None else valid_BS[:rows])


def _in_place(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    true(x_BSD, x_BSD, valid_BS)
    out_BSD.copy_(x_BSD)


def _one_bit(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    true(x_BSD, out_BSD, valid_BS)
    x_BSD[0, 0, 0] = -x_BSD[0, 0, 0]


def _spoil_mask(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    true(x_BSD, out_BSD, valid_BS)
    if valid_BS is not None:
        valid_BS.logical_not_()


def _dirty(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    true(x_BSD, out_BSD, valid_BS)
    if valid_BS is not None:
        out_BSD.masked_fill_(~valid_BS[..., None], 1.0)


def _element(value: float) -> Maker:
    def lie(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
        true(x_BSD, out_BSD, valid_BS)
        out_BSD[1, 2, 3] += value

    return cheat(lie)


def _all_true_is_another(true: Program, x_BSD: Tensor, out_BSD: Tensor, valid_BS: Tensor | None) -> None:
    true(x_BSD if valid_BS is None else x_BSD * 1.1, out_BSD, valid_BS)


# Without masks, one scale, a few trials: each must be caught by these alone.
CHEATS: dict[str, Maker] = {
    "the previous call's output": stale,
    "zeros": cheat(lambda true, x, out, valid: out.zero_()),
    "nothing written": cheat(lambda true, x, out, valid: None),
    "half of the rows written": cheat(_half),
    "work that comes late": cheat(_late),
    "its own input overwritten": cheat(_in_place),
    "one sign of its input flipped": cheat(_one_bit),
    "remembered by the input's address": remembering(lambda x, out, valid: x.data_ptr()),
    "remembered by the output's address": remembering(lambda x, out, valid: out.data_ptr()),
    "one element off": _element(0.05),
    "one NaN": _element(float("nan")),
    "one infinity": _element(float("inf")),
    "the input handed back": cheat(lambda true, x, out, valid: out.copy_(x)),
    "the weights spoilt when made": weights_spoilt_when_made,
    "the weights spoilt when called": weights_spoilt_when_called,
    "another answer under a mask that is all true": cheat(_all_true_is_another),
}

# Caught by trials with masks only.
MASK_CHEATS: dict[str, Maker] = {
    "masks ignored": cheat(lambda true, x, out, valid: true(x, out, None)),
    "masks remembered by address": masks_by_address,
    "the mask changed": cheat(_spoil_mask),
    "invalid tokens not set to zero": cheat(_dirty),
}
