"""x · Wᵀ + b whose rows do not know of each other: row i has the same bits alone and among any others.

A library picks another kernel for another number of rows, and with it another order of addition. Here the order is a
function of the weight's shape alone: K is cut into `stretches` of whole steps; each is summed from zero, step after
step, and the sums are added in order. Few rows: a program for each stretch, so that the GPU is full, and the last to
finish adds up. Many rows: one program does the stretches of its tile one after the other. Both add the same numbers
in the same order with the same instructions, on tiles of the same size.

On a CPU every row is a product of its own. fp32 is true fp32 (no TF32).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """As `reference`: x (…, in), weight (out, in), bias (out) → (…, out), all of one precision; `wide`: the result in
    fp32, as it was summed."""
    rows = x.flatten(0, -2)
    if x.device.type == "cuda":
        from .batch_invariant_linear_triton import fixed_rows

        y = fixed_rows(rows, weight, bias, wide)
    elif not len(rows):
        y = rows.new_empty(0, weight.shape[0], dtype=torch.float32 if wide else None)
    else:
        if wide:
            rows, weight = rows.float(), weight.float()
        y = torch.cat([F.linear(row, weight, bias) for row in rows.split(1)])
    return y.view(*x.shape[:-1], weight.shape[0])
