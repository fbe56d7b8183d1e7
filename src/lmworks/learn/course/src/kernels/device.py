"""Triton on this machine: kernels are compiled for its GPU; without one they are interpreted, on the CPU.

Triton chooses when it is imported. On a machine with a GPU, `TRITON_INTERPRET=1` in the environment interprets them.
The interpreter of Triton 3.9 takes the bits of bf16 for integers: use fp32 and fp16 there, or convert after loads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit('kernels need Triton; on Linux, `pip install "lmworks[learn]"` brings it')

__all__ = ["DEVICE", "compare", "tl", "triton"]


def compare(what: str, ours: Callable[..., Tensor], pytorch: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Prints how far our result is from PyTorch's; on a GPU the time of both, too."""
    apart = (ours(*inputs).double() - pytorch(*inputs).double()).abs().max().item()
    line = f"{what} on {DEVICE}: at most {apart:.2g} from PyTorch"
    if DEVICE == "cuda":
        times = (1e3 * triton.testing.do_bench(lambda one=one: one(*inputs)) for one in (ours, pytorch))
        line += "; {:,.0f} µs, PyTorch {:,.0f} µs".format(*times)
    print(line)
