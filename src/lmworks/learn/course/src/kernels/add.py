"""A first kernel: the sum of two tensors.

    python src/kernels/add.py

compares it with PyTorch's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.device import DEVICE, compare, tl, triton


# exercise triton_add() -> add_kernel
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x + y, mask=inside)


# end triton_add


def add(x: Tensor, y: Tensor, block: int = 1024) -> Tensor:
    """x + y, of one shape and contiguous; `block` elements a program."""
    out = torch.empty_like(x)
    n = x.numel()
    add_kernel[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block)
    return out


def main() -> None:
    for n in (1000, 100_003) if DEVICE == "cpu" else (1000, 2**26 + 3):
        compare(f"{n:,} elements", add, torch.add, *torch.randn(2, n, device=DEVICE))


if __name__ == "__main__":
    main()
