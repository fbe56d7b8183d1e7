"""Means, variances and whitening over the positions of a mask.

What is outside the mask is replaced, not multiplied by zero: an infinite value in the padding reaches neither the
result nor a gradient. Sums are in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

Denominator = float | Tensor | None
"""What a sum is divided by: of the global batch, over micro-batches and ranks; None: of the batch at hand."""


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), at_least_fp32(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    kept = zero_outside(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Over all positions of the mask, or along `dim`; 0 where there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Divided by n − 1, or by n as lm-human-preferences has it (`unbiased=False`); 0 for one position."""
    x = zero_outside(x, mask)
    squares = masked_sum((x - masked_mean(x, mask)) ** 2, mask)
    return squares / (mask.bool().sum() - int(unbiased)).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, unbiased: bool = True, eps: float = 1e-8) -> Tensor:
    """To variance 1 and, with `shift_mean`, to mean 0; zeros outside the mask.

    PPO whitens advantages with the shift, and rewards without it: their sign must survive.
    """
    x = zero_outside(x, mask)
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask, unbiased) + eps)
    return zero_outside(whitened if shift_mean else whitened + mean, mask)


def batch_mean(losses: Tensor, denominator: Denominator) -> Tensor:
    """Mean of a batch; with `denominator` its sum divided by that: the share of this batch in a mean of many."""
    return losses.sum() / (max(1, losses.numel()) if denominator is None else denominator)
