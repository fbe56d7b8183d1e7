"""RMSNorm on a CPU, whose gradient is a formula of its own."""

from __future__ import annotations

import pytest
import torch

from lmworks.kernels.rms_norm import rms_norm


def test_second_derivative_is_rejected() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    (grad,) = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
