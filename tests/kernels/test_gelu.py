"""The compiled formula of GELU beside PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmworks.kernels.training.gelu import gelu, sigmoid_gelu


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)])
def test_values_and_gradients_equal_torch(dtype: torch.dtype, close: float) -> None:
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([0.0, -0.0, 1e4, -1e4])]).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    wanted = F.gelu(exact, approximate="tanh")
    (gradient,) = torch.autograd.grad(wanted.sum(), exact)
    for function in (sigmoid_gelu, gelu):
        found = function(x)
        (gelu_grad,) = torch.autograd.grad(found.float().sum(), x)
        torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)
        torch.testing.assert_close(gelu_grad.double(), gradient, rtol=close, atol=close)
