"""Quantisation to 8 bits: formats, scales, products, and the kernels against the formula.

Kernels run where there is a GPU, or under Triton's interpreter: TRITON_INTERPRET=1, with triton on the path. The
interpreter rounds to fp8 wrongly, so there the kernels get numbers that need no rounding.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from lmworks.kernels.inference import quantized
from lmworks.kernels.training import float8
from lmworks.kernels.training.float8 import E4M3, E5M2, FP8_MAX, dequantize, quantize
from lmworks.spec import SpecError

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")
BITS = {E4M3: 3, E5M2: 2}


def drawn(rows: int, columns: int) -> Tensor:
    """Rows of sizes that lie far apart, and one of zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x *= torch.logspace(-3, 2, rows, device=DEVICE).unsqueeze(1)
    x[rows // 2] = 0
    return x


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("power", [False, True])
def test_quantize_dequantize_is_close(dtype: torch.dtype, by_row: bool, power: bool) -> None:
    x = drawn(6, 40)
    small = quantize(x, dtype, by_row=by_row, power_of_two=power, implementation="torch")
    assert small.scale.shape == ((6,) if by_row else ())
    error = (dequantize(small) - x).abs()
    scale = small.scale.unsqueeze(1) if by_row else small.scale
    least = torch.finfo(dtype).smallest_normal
    assert bool((error <= 2.0 ** -(BITS[dtype] + 1) * (x.abs() + least * scale)).all())
    top = small.values.float().abs().amax(dim=1 if by_row else None)
    used = top if not by_row else top[top > 0]
    assert bool((used <= FP8_MAX[dtype]).all())
    if power:
        assert bool((torch.frexp(small.scale).mantissa == 0.5).all())
        assert bool((used > FP8_MAX[dtype] / 2).all())
    else:
        assert bool((used == FP8_MAX[dtype]).all())


def test_scale_rounds_up_to_power_of_two() -> None:
    scales = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 2.0**-20])
    assert float8.round_up_to_power_of_two(scales).tolist() == [1.0, 2.0, 1.0, 4.0, 2.0**-20]


def test_cast_saturates_and_keeps_nan() -> None:
    x = torch.tensor([[3e4, -1e30, 0.0]])
    assert quantize(x, E5M2).values.float().abs().max() == FP8_MAX[E5M2]
    assert quantize(torch.tensor([[1.0, torch.nan]])).values.float().isnan().any()


def test_linear_equals_scaled_mm() -> None:
    x, weight = drawn(32, 64).bfloat16().float(), drawn(48, 64)
    a, b = quantize(x), quantize(weight)
    theirs = torch._scaled_mm(a.values, b.values.t(), a.scale, b.scale, out_dtype=torch.bfloat16)
    ours = float8.fp8_linear(weight)(x)
    assert float((ours - theirs.float()).norm() / theirs.float().norm()) < 1e-2
    exact = x.double() @ weight.double().t()
    assert float((ours - exact).norm() / exact.norm()) < 0.06


def test_engine_row_quantization_is_equal() -> None:
    x = drawn(5, 33)
    values, scale = quantized.fp8_quantize(x)
    same = quantize(x, by_row=True, implementation="torch")
    assert torch.equal(values.view(torch.uint8), same.values.view(torch.uint8))
    assert torch.equal(scale, same.scale)


def test_rowwise_scales_reject_transpose() -> None:
    with pytest.raises(SpecError, match=r"quantize x\.t\(\) by row instead"):
        quantize(torch.zeros(2, 2), by_row=True, transposed=True)


# --- kernels --------------------------------------------------------------------------------------------


def exact(rows: int, columns: int, dtype: torch.dtype, power: bool, by_row: bool) -> Tensor:
    """Numbers of the format, times a power of two that is found again: the largest is the format's, or, where scales
    are rounded up to powers of two, less."""
    bits = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    top = FP8_MAX[dtype] * (4 / 7 if power else 1)
    x = bits.view(dtype).float().nan_to_num(0, 0, 0).clamp(-top, top)
    x[:, 0] = top
    return (x * torch.exp2(torch.arange(rows) - 5.0).unsqueeze(1) if by_row else x / 8).to(DEVICE)


@with_triton
@pytest.mark.parametrize("options", [{"by_row": True}, {}, {"transposed": True}], ids=["rows", "tensor", "turned"])
@pytest.mark.parametrize(("dtype", "power"), [(E4M3, False), (E5M2, True)])
def test_kernels_equal_reference(
    dtype: torch.dtype, options: dict[str, bool], power: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes that fill no tile, and a tensor of more spans than there are programs for them."""
    from lmworks.kernels.training import float8_triton

    monkeypatch.setattr(float8_triton, "AMAX_PROGRAMS", 2)
    monkeypatch.setattr(float8_triton, "AMAX_BLOCK", 128)
    monkeypatch.setattr(float8_triton, "TILE", (8, 32))
    monkeypatch.setattr(float8_triton, "TRANSPOSED_TILE", (16, 32))
    for x in [exact(19, 41, dtype, power, "by_row" in options), *([drawn(19, 41)] if GPU else [])]:
        found = quantize(x, dtype, power_of_two=power, implementation="triton", **options)
        wanted = float8.reference(x, dtype, power_of_two=power, **options)
        assert torch.equal(found.scale, wanted.scale)
        assert found.values.is_contiguous()
        assert found.values.dtype == dtype
        assert torch.equal(found.values.float(), wanted.values.float())


@with_triton
@pytest.mark.parametrize("by_row", [False, True])
def test_dequantize_kernel_equals_reference(by_row: bool) -> None:
    small = quantize(drawn(5, 75), by_row=by_row, implementation="torch")
    found = dequantize(small, torch.float32, implementation="triton")
    assert torch.equal(found, dequantize(small, torch.float32, implementation="torch"))
