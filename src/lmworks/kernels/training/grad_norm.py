"""Σ x² over all numbers of many tensors: what the norm of a gradient is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import pick

IMPLEMENTATIONS = ("torch", "triton")


def sum_squares(tensors: Sequence[Tensor], implementation: str | None = None) -> Tensor:
    """An fp32 scalar, summed in the same order each time. In Triton all tensors are one launch, of one pass."""
    shape = {"tensors": len(tensors), "numbers": sum(tensor.numel() for tensor in tensors)}
    chosen = pick("sum_squares", implementation, IMPLEMENTATIONS, tensors[0].device, **shape)
    if chosen == "triton":
        from .grad_norm_triton import launch

        return launch(tensors)
    return reference(tensors)


def reference(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)).square().sum()
