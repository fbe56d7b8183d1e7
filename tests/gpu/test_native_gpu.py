"""The operator that is built from CUDA on a machine with a GPU: what it computes, and that compilers take it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.kernels import native
from lmworks.kernels.rms_norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPS = 1e-5


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=rng, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(700, 64), (37, 1300), (3, 2, 4097), (9, 8192), (20_000, 128), (1, 16384), (0, 8)])
def test_native_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Wide loads, and single ones where rows are no multiple of 16 bytes; twice the same bits."""
    x, weight, grad = (
        random(*shape, seed=0, dtype=dtype),
        random(shape[-1], seed=1),
        random(*shape, seed=2, dtype=dtype),
    )
    y = rms_norm(x, weight, EPS, "native")
    mine = [y, *torch.autograd.grad(y, (x, weight), grad)]
    again = rms_norm(x, weight, EPS, "native")
    repeated = [again, *torch.autograd.grad(again, (x, weight), grad)]
    assert all(torch.equal(one, other) for one, other in zip(mine, repeated, strict=True))
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = F.rms_norm(wide[0], wide[1].shape, wide[1], EPS)
    theirs = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for one, other in zip(mine, theirs, strict=True):
        step = torch.finfo(one.dtype).eps
        atol = max(4e-6, step / 8) * (other.abs().max().item() if other.numel() else 0)
        torch.testing.assert_close(one.double(), other, rtol=max(4e-6, step), atol=atol)


def test_native_passes_opcheck() -> None:
    assert native.load().cuda
    op = torch.ops.lmworks.rms_norm_native.default
    x, weight = random(4, 3, 10, seed=10, dtype=torch.bfloat16), random(10, seed=11)
    torch.library.opcheck(op, (x, weight, EPS))
    compiled = torch.compile(lambda x, w: native.rms_norm(x * 2, w, EPS).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), native.rms_norm(x * 2, weight, EPS).relu())
