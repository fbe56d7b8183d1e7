"""`pairs_triton.unpack_8bit`, launched by itself."""

# mypy: allow-untyped-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.kernels.inference.packed_8bit_triton import unpack_8bit
from lmworks.kernels.triton_support import tl, triton


@triton.jit
def widen_kernel(words_ptr, low_ptr, high_ptr, INTEGER: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = unpack_8bit(tl.load(words_ptr + at), INTEGER)
    tl.store(low_ptr + at, low)
    tl.store(high_ptr + at, high)


def widen(words: Tensor, integer: bool) -> tuple[Tensor, Tensor]:
    low, high = (torch.empty_like(words, dtype=torch.float16) for _ in range(2))
    widen_kernel[(len(words) // 1024,)](words, low, high, integer, 1024)
    return low, high
