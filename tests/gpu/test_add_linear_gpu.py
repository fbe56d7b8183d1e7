"""A sum that cuBLAS takes along with a product, beside the same in fp32; every way that it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.training import cublas
from lmworks.kernels.training.add_linear import add_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> Tensor:
    luck = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=luck)).to(dtype)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", cublas.TYPES)
@pytest.mark.parametrize("way", cublas.WAYS)
@pytest.mark.parametrize("shape", [(65_536, 768, 768), (1, 64, 64), (77, 136, 520)])
def test_all_ways_are_within_rounding(shape: tuple[int, int, int], way: str, dtype: torch.dtype) -> None:
    tokens, inner, hidden = shape
    x, y = drawn(tokens, hidden, dtype=dtype).requires_grad_(), drawn(tokens, inner, dtype=dtype, seed=1)
    weight = drawn(hidden, inner, dtype=dtype, scale=inner**-0.5, seed=2)
    found = add_linear(x, y, weight, None, way)
    assert "AddLinear" in str(found.grad_fn)
    assert off(found, x.float() + F.linear(y.float(), weight.float())) < torch.finfo(dtype).eps


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_a_layer_and_a_sum(compiled: bool) -> None:
    given = drawn(2, 100, 256), drawn(2, 100, 256, seed=1), drawn(256, 256, scale=0.06, seed=2), drawn(256, seed=3)
    leaves = [one.requires_grad_() for one in given]
    wide = [one.detach().float().requires_grad_() for one in leaves]

    def ours(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_linear(x, y.sigmoid(), weight, bias, "cublas 0")

    x, y, weight, bias = wide
    wanted = x + F.linear(y.sigmoid(), weight, bias)
    grad = drawn(*wanted.shape, seed=9)
    exact = torch.autograd.grad(wanted, wide, grad.float())
    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*leaves)
    assert off(found, wanted.detach()) < 0.01
    for one, other in zip(torch.autograd.grad(found, leaves, grad), exact, strict=True):
        assert off(one, other) < 0.01
