"""What stands between two parts of a block: add to the residual stream, then normalise it for the next part."""

from __future__ import annotations

from torch import Tensor

from . import rms_norm


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm), both (tokens, hidden) in the precision of x."""
    if x.device.type == "cuda":
        from .add_norm_triton import launch

        return launch(x, delta, weight, eps)
    return reference(x, delta, weight, eps)


def reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm.rms_norm(total, weight, eps)
