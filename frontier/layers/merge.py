"""Joins attention over one more block of keys to attention over those before it, by log-sum-exp.

Takes    running outputs and log-sum-exps in float32, a block's in any precision.
Gives    the running ones over both, in place.
Knows nothing of kernels, chunks or where keys come from.

Letters  C query positions, H heads, K head width.
"""

import torch
from torch import Tensor


def merge(
    out_CHK: Tensor, lse_HC: Tensor, block_CHK: Tensor, block_lse_HC: Tensor, empty_HC: Tensor | None = None
) -> None:
    """Take the block's keys into `out_CHK` and `lse_HC`.

    Units    lse is the natural logarithm.
    Order    any order of blocks gives the same, up to rounding, however far apart their log-sum-exps lie: both
             weights are exponentials of what is at most 0, and the larger one is 1.
    Empty    a side without keys has lse -inf, or +inf as some kernels say it: its weight is exactly 0. Where a
             block's emptiness does not show in its lse, `empty_HC` says it (bool, true without keys), and what
             stands in its output is never looked at. Two empty sides are an empty one: lse -inf, output 0.
    Overflow a NaN of either side stays one: an infinite score gives lse +inf, but then its output is NaN.
    Source   online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    if empty_HC is not None:
        block_lse_HC = block_lse_HC.masked_fill(empty_HC, -torch.inf)
        block_CHK = block_CHK.masked_fill(empty_HC.t().unsqueeze(-1), 0)
    a_HC, b_HC = (lse.masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_HC, block_lse_HC.float()))
    high_HC = torch.maximum(a_HC, b_HC)
    high_HC = high_HC.masked_fill(high_HC == -torch.inf, 0.0)
    a_HC, b_HC = (a_HC - high_HC).exp_(), (b_HC - high_HC).exp_()
    total_HC = a_HC + b_HC
    shares_CH1 = [(part / total_HC).masked_fill_(total_HC == 0, 0.0).t().unsqueeze(-1) for part in (a_HC, b_HC)]
    out_CHK.mul_(shares_CH1[0]).addcmul_(block_CHK, shares_CH1[1])
    torch.add(high_HC, total_HC.log_(), out=lse_HC)
