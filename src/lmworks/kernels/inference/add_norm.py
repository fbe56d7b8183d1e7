"""Residual add and RMSNorm in one pass over memory: the sum is written, and normalised while it is in registers.

Inference only: there is no backward pass.
"""

from __future__ import annotations

from torch import Tensor

from ...spec import SpecError
from ..rms_norm import rms_norm

IMPLEMENTATIONS = ("torch", "triton")


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, implementation: str = "torch"
) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm), both in the precision that x + delta has in PyTorch."""
    if implementation not in IMPLEMENTATIONS:
        raise SpecError(f"add_rms_norm has no implementation {implementation!r}: {' or '.join(IMPLEMENTATIONS)}")
    if implementation == "triton":
        from ..rms_norm_triton import forward

        total, normed, _ = forward(x, delta, weight, eps)
        return total, normed
    total = x + delta
    return total, rms_norm(total, weight, eps)
