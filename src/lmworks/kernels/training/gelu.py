"""GELU in its tanh form, as GPT-2 has it: x · (1 + tanh u) / 2 = x · σ(2u), u = √(2/π) · (x + 0.044715 x³).

A compiled tanh has branches and is compute-bound; a sigmoid is one exponential.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TWICE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor) -> Tensor:
    return sigmoid_gelu(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


def sigmoid_gelu(x: Tensor) -> Tensor:
    """In fp32, as PyTorch's own."""
    wide = x.float()
    return (wide * torch.sigmoid(TWICE * (wide + CUBE * wide**3))).to(x.dtype)


def gelu_grad(x: Tensor) -> Tensor:
    """The derivative, in fp32."""
    wide = x.float()
    half = torch.sigmoid(TWICE * (wide + CUBE * wide**3))
    return half + wide * half * (1 - half) * TWICE * (1 + 3 * CUBE * wide**2)
