"""Numbers in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

E4M3_MAX = 448.0  # beyond it torch.float8_e4m3fn has no number: a cast gives NaN


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values in torch.float8_e4m3fn, scale in fp32): x ≈ values · scale, and the largest of x becomes 448."""
    # exercise fp8(x)
    scale = (x.float().abs().amax() / E4M3_MAX).clamp(min=1e-12)  # a tensor of zeros
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
    # end fp8


def stochastic_round(x: Tensor, random: Tensor) -> Tensor:
    """fp32 → bf16, up or down with the chances that make it right on average.

    random (as x, int32): uniform in 0 … 65535. bf16 is the upper 16 bits of an fp32 number. What is not finite stays.
    """
    # exercise stochastic_rounding(x, random)
    bits = (x.view(torch.int32) + random) & ~0xFFFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()
    # end stochastic_rounding
