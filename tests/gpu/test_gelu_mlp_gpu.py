"""What cuBLAS computes at the end of a product, beside the same in fp32; every way that it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels.training import cublas, gelu_mlp
from lmworks.kernels.training.cublas import linear_add, linear_dgelu, linear_gelu
from lmworks.kernels.training.gelu import gelu_grad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# tokens, hidden, ffn
SHAPES = [(65_536, 768, 3072), (1, 64, 256), (77, 128, 520), (1000, 1600, 6400)]


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    luck = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=luck)).to(dtype)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", cublas.TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_all_algorithms_are_within_rounding(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype) -> None:
    tokens, hidden, ffn = shape
    x, grad = drawn(tokens, hidden, dtype=dtype), drawn(tokens, hidden, dtype=dtype, seed=1)
    up, down = drawn(ffn, hidden, dtype=dtype, scale=hidden**-0.5), drawn(hidden, ffn, dtype=dtype, scale=ffn**-0.5)
    added = drawn(ffn, dtype=dtype, seed=2) if bias else None
    wide = F.linear(x.float(), up.float(), None if added is None else added.float())
    rounding = torch.finfo(dtype).eps
    for way in range(len(cublas.ALGORITHMS)):
        inner, pre = linear_gelu(x, up, added, way)
        assert off(pre, wide) < rounding, way
        assert off(inner, F.gelu(wide, approximate="tanh")) < rounding, way
        found = linear_dgelu(grad, down, pre, way)
        assert off(found, (grad.float() @ down.float()) * gelu_grad(pre)) < rounding, way
        last = grad[0].clone() if bias else None
        sums = grad.float() + F.linear(inner.float(), down.float(), None if last is None else last.float())
        assert off(linear_add(inner, down, last, grad, way), sums) < rounding, way


@pytest.mark.parametrize("compiled", [False, True])
def test_mlp_and_gradients_equal_three_layers(compiled: bool) -> None:
    dtype = torch.bfloat16
    shapes = [(2, 100, 256), (2, 100, 256), (1024, 256), (1024,), (256, 1024), (256,)]
    scales = [1, 1, 0.06, 0.1, 0.03, 0.1]
    pairs = enumerate(zip(shapes, scales, strict=True))
    given = [drawn(*shape, dtype=dtype, scale=scale, seed=seed) for seed, (shape, scale) in pairs]
    leaves = [one.requires_grad_() for one in given]
    wide = [one.detach().float().requires_grad_() for one in leaves]
    x, y, up, up_bias, down, down_bias = wide
    wanted = x + F.linear(F.gelu(F.linear(y, up, up_bias), approximate="tanh"), down, down_bias)
    grad = drawn(*wanted.shape, dtype=dtype, seed=3)
    exact = torch.autograd.grad(wanted, wide, grad.float())

    def ours(*tensors: Tensor) -> Tensor:
        return gelu_mlp.add_gelu_mlp(*tensors, implementation="cublas 0")

    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*leaves)
    assert off(found, wanted.detach()) < 0.01
    for one, other in zip(torch.autograd.grad(found, leaves, grad), exact, strict=True):
        assert off(one, other) < 0.01
