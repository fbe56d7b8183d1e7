"""SwiGLU's MLP in 8 bits on a GPU: its kernels against the formulas, and compiled beside torchao's layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.kernels.training import swiglu_fp8, swiglu_fp8_triton
from lmworks.kernels.training.float8 import has_fp8_matmul
from lmworks.kernels.training.swiglu_fp8 import swiglu_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_fp8_matmul(torch.device("cuda")), reason="fp8 products would be emulated"
    ),
]


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=draw, device="cuda")).bfloat16()


def off(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())


def differing(found: Tensor, wanted: Tensor) -> float:
    """A share of numbers: few lie so near the middle of two levels that the order of operations tells."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.is_contiguous()
    return float((found.float() != wanted.float()).float().mean())


@pytest.mark.parametrize("shape", [(16_384, 14_336), (4096, 8192), (48, 64), (20, 41), (1004, 1300)], ids=str)
def test_kernels_equal_references(shape: tuple[int, int]) -> None:
    grad, gate, up = (drawn(*shape, scale=scale, seed=seed) for seed, scale in enumerate((1e-4, 3.0, 2.0)))
    values, scale = swiglu_fp8_triton.forward(gate, up)
    wanted, wanted_scale = swiglu_fp8.forward_reference(gate, up)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-5, atol=0)
    assert differing(values, wanted) < 0.01
    *small, of_gate, of_up = swiglu_fp8_triton.backward(grad, gate, up, scale)
    *expected, wanted_of_gate, wanted_of_up = swiglu_fp8.backward_reference(grad, gate, up, scale)
    torch.testing.assert_close((of_gate, of_up), (wanted_of_gate, wanted_of_up), rtol=1e-5, atol=0)
    for one, other in zip(small, expected, strict=True):
        assert differing(one, other) < 0.01
    for as_is, turned in ((small[0], small[1]), (small[2], small[3]), (values, small[4])):
        assert torch.equal(as_is.view(torch.uint8).t(), turned.view(torch.uint8))


def test_nan_is_preserved() -> None:
    gate, up = drawn(16, 32), drawn(16, 32, seed=1)
    up[3, 5] = torch.nan
    values, scale = swiglu_fp8_triton.forward(gate, up)
    assert values.float().isnan().nonzero().tolist() == [[3, 5]]
    small = swiglu_fp8_triton.backward(gate, gate, up, scale)
    assert small[0].float().isnan().nonzero().tolist() == [[3, 5]]
    assert small[1].float().isnan().nonzero().tolist() == [[5, 3]]


class Layers(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        for place, layer in enumerate((self.gate, self.up, self.down)):
            layer.bias, layer.weight = None, nn.Parameter(drawn(*layer.weight.shape, scale=0.05, seed=place))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Joined(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return swiglu_mlp(x, self.gate.weight, self.up.weight, self.down.weight)


def with_gradients(way: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    result = torch.compile(way, fullgraph=True)(leaf)
    grad = drawn(*x.shape, scale=1e-3, seed=9).to(result.dtype)
    return [result, *torch.autograd.grad(result, [leaf, *way.parameters()], grad)]


def test_compiled_error_is_similar_to_torchao() -> None:
    float8 = pytest.importorskip("torchao.float8")
    x, joined, layers = drawn(4, 512, 512, seed=8), Joined(512, 1536), Layers(512, 1536)
    exact = with_gradients(copy.deepcopy(layers).float(), x.float())
    theirs = with_gradients(float8.convert_to_float8_training(layers), x)
    for mine, other, right in zip(with_gradients(joined, x), theirs, exact, strict=True):
        assert mine.shape == right.shape and mine.dtype == torch.bfloat16
        assert off(other, right) > 0.03  # 8 bits
        assert off(mine, right) < 1.05 * off(other, right)
        assert off(mine, other) < 0.5 * off(other, right)
