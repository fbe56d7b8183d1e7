"""x + delta and its RMSNorm in one pass over memory: a program holds the whole row of a token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import power_of_two, tl, triton


def launch(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `add_norm.reference`."""
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    hidden = x.shape[-1]
    block = power_of_two(hidden)
    add_norm_kernel[(x.numel() // hidden,)](
        x, delta, weight, total, normed, hidden, eps, BLOCK=block, num_warps=min(16, max(1, block // 256))
    )
    return total, normed


@triton.jit
def add_norm_kernel(x_ptr, delta_ptr, weight_ptr, total_ptr, normed_ptr, hidden, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    delta = tl.load(delta_ptr + row + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    # The norm is of the sum as it is kept, rounded to the precision of the stream.
    total = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row + column, total, mask=inside)
    wide = total.to(tl.float32)
    r = 1 / tl.sqrt_rn(tl.sum(wide * wide, 0) / hidden + eps)
    tl.store(normed_ptr + row + column, wide * r * weight, mask=inside)
