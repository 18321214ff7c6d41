"""Reads a mask of valid tokens.

Takes    an .npy file of bool, or of uint8 that holds 0 and 1.
Gives    a bool tensor with a value for each position of each row.
Knows nothing of attention.

Shapes   B rows, S positions.
"""

from pathlib import Path

import torch
from torch import Tensor

from frontier.case import Case
from frontier.data.layout import check_shape, check_size
from frontier.data.memory import bytes_of
from frontier.data.npy_header import npy_layout
from frontier.data.reading import InputFile
from frontier.errors import DataError

_DTYPES = {"|b1": torch.bool, "|u1": torch.uint8}


def checked_mask(valid_BS: Tensor, case: Case) -> Tensor | None:
    """The mask on the host, or None if every token is valid: that is no mask, and costs nothing.

    Raises   DataError if it is not bool, or not of the case's shape: rows of another batch would be hidden in silence.
    """
    wanted = (case.batch_size, case.seq_len)
    if valid_BS.dtype != torch.bool or valid_BS.shape != wanted:
        raise DataError(
            f"the mask is {valid_BS.dtype} {list(valid_BS.shape)}, case {case.name} needs torch.bool {list(wanted)}",
            hint="give one value for each position of each row; true is a valid token",
        )
    return None if bool(valid_BS.all()) else valid_BS.cpu()


def open_mask(path: str | Path, case: Case) -> Tensor:
    """The mask `[B, S]` in `path`; true is a valid token.

    Raises   DataError if the file is not whole, not of the case's shape, or holds what is neither true nor false.
    """
    if Path(path).suffix != ".npy":
        raise DataError(f"{path} ends in `{Path(path).suffix}`, a mask ends in .npy", hint="save it with numpy.save")
    file = InputFile(path)
    try:
        layout = npy_layout(file, _DTYPES)
        check_shape(file, layout, {"batch_size": case.batch_size, "seq_len": case.seq_len}, case.name)
        check_size(file, layout.offset_bytes + layout.num_bytes)
        mask_BS = torch.empty(layout.shape, dtype=torch.uint8)
        file.read_into(bytes_of(mask_BS), layout.offset_bytes)
        file.check_unchanged()
    finally:
        file.close()
    # Checked in a bool file too: a bool tensor over any other byte is undefined behaviour.
    if mask_BS.max() > 1:
        row, position = (int(index) for index in (mask_BS > 1).nonzero()[0])
        raise DataError(
            f"{path} holds {int(mask_BS[row, position])} at row {row}, position {position}, a mask holds 0 and 1",
            hint="save (mask != 0)",
        )
    return mask_BS.view(torch.bool)
