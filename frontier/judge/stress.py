"""Inputs and masks that a trial is made of: as the benchmark script draws them, and as nobody would wish them.

Takes    a shape, seeded generators.
Gives    rows and masks by name, in two tables.
Knows nothing of what is computed from them.

Letters  B rows, S positions, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Shape = tuple[int, int, int]


def normal_rows(shape: Shape, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Standard normal rows times `scale`, on the generator's device: the benchmark script's inputs."""
    return torch.randn(shape, generator=generator, device=generator.device) * scale


def padded_prefixes(shape: Shape, generator: torch.Generator, padding: float) -> Tensor:
    """The benchmark script's mask, on the generator's device: row lengths uniform from S (1 - padding) to S."""
    B, S, _ = shape
    shortest = max(1, round(S * (1 - padding)))
    lengths_B = torch.randint(shortest, S + 1, (B,), generator=generator, device=generator.device)
    return torch.arange(S, device=generator.device) < lengths_B[:, None]


def _constant_row(x_BSD: Tensor) -> Tensor:
    x_BSD[:, ::8] = 3.0  # LayerNorm sees no variance: its output is its bias, whatever rounding leaves is amplified
    return x_BSD


def _huge_outlier(x_BSD: Tensor) -> Tensor:
    x_BSD[:, x_BSD.shape[1] // 3, x_BSD.shape[2] // 2] = 1e4
    return x_BSD


def _ties(x_BSD: Tensor) -> Tensor:
    x_BSD.round_()
    x_BSD[:, 1::2] = x_BSD[:, : x_BSD.shape[1] // 2 * 2 : 2]  # each token twice: equal scores side by side
    return x_BSD


def _tiny_variance(x_BSD: Tensor) -> Tensor:
    return x_BSD.mul_(1e-4).add_(1.0)


def _alternating_sign(x_BSD: Tensor) -> Tensor:
    signs_D = 1.0 - 2.0 * (torch.arange(x_BSD.shape[2], device=x_BSD.device) % 2)
    return x_BSD.abs_().add_(0.5).mul_(signs_D)


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant rows": _constant_row,
    "huge outlier": _huge_outlier,
    "ties": _ties,
    "tiny variance": _tiny_variance,
    "alternating sign": _alternating_sign,
}


def _prefix(draw_BS: Tensor) -> Tensor:
    """Lengths from 1 to S, drawn by each row's first number."""
    S = draw_BS.shape[1]
    return torch.arange(S) < 1 + (draw_BS[:, :1] * S).floor()


# From uniform numbers in [0, 1) on the host, one a token.
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "prefix": _prefix,
    "left padding": lambda draw_BS: _prefix(draw_BS).flip(1),
    "holes": lambda draw_BS: draw_BS > 0.3,
    "one valid token": lambda draw_BS: torch.arange(draw_BS.shape[1]) == draw_BS.argmax(1, keepdim=True),
    "none valid": lambda draw_BS: torch.zeros_like(draw_BS, dtype=torch.bool),
}
