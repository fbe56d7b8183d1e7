"""A softmax of each row in one pass over memory.

    python src/kernels/softmax.py

compares it with PyTorch's.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.device import DEVICE, compare, tl, triton


# exercise triton_softmax() -> softmax_kernel
@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row · stride may be more than an int32 holds
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * out_stride + column, weights / tl.sum(weights, 0), mask=inside)


# end triton_softmax


def softmax(x: Tensor) -> Tensor:
    """The softmax of each row of x (rows, columns), which may be part of a wider tensor. A program has a whole row."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, out, columns, x.stride(0), out.stride(0), BLOCK=block)
    return out


def main() -> None:
    for shape in ((4, 1000), (64, 3000)) if DEVICE == "cpu" else ((4, 1000), (65_536, 3000)):
        compare(f"{shape} in fp32", softmax, partial(torch.softmax, dim=1), torch.randn(shape, device=DEVICE))


if __name__ == "__main__":
    main()
