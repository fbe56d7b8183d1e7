"""Sums that cuBLAS takes along with a product, beside the same in fp32; every way that it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import cublas
from lmworks.kernels.sums import add_linear, input_gradient, linears

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
@pytest.mark.parametrize("shape", [(65_536, 768, (768, 768, 768)), (1, 64, (64, 8, 8)), (77, 136, (520, 128, 128))])
def test_all_ways_are_within_rounding(shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype) -> None:
    tokens, hidden, outs = shape
    grads = [drawn(tokens, out, dtype=dtype, seed=out + place) for place, out in enumerate(outs)]
    weights = [drawn(out, hidden, dtype=dtype, scale=out**-0.5, seed=place) for place, out in enumerate(outs)]
    wanted = sum(grad.float() @ weight.float() for grad, weight in zip(grads, weights, strict=True))
    for way in range(len(cublas.WAYS)):
        assert off(input_gradient(grads, weights, way), wanted) < 2 * torch.finfo(dtype).eps, way  # rounded three times
        again = cublas.product_add(grads[0], weights[0], grads[0] @ weights[0], way)
        assert off(again, 2 * grads[0].float() @ weights[0].float()) < 2 * torch.finfo(dtype).eps, way


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_with_its_sums_and_gradients_is_that_of_layers(compiled: bool) -> None:
    x, y = drawn(2, 100, 256), drawn(2, 100, 256, seed=1)
    weights = [drawn(256, 256, scale=0.06, seed=seed) for seed in range(2, 6)]
    leaves = [one.requires_grad_() for one in (x, y, *weights)]
    wide = [one.detach().float().requires_grad_() for one in leaves]

    def plain(x: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        a, b, c = (F.linear(y, weight) for weight in (q, k, v))
        return x + F.linear(a * b.sigmoid() + c, out)

    def ours(x: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        a, b, c = linears(y, [(weight, None) for weight in (q, k, v)], "cublas 0")
        return add_linear(x, a * b.sigmoid() + c, (out, None), "cublas 0")

    wanted = plain(*wide)
    grad = drawn(*wanted.shape, seed=9)
    exact = torch.autograd.grad(wanted, wide, grad.float())
    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*leaves)
    assert off(found, wanted.detach()) < 0.01
    for one, other in zip(torch.autograd.grad(found, leaves, grad), exact, strict=True):
        assert off(one, other) < 0.01
