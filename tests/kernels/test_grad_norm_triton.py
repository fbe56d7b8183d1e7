"""Σ x² of many tensors, against fp64. The kernel runs where there is a GPU, or under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from lmworks.kernels.training.grad_norm import reference, sum_squares

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu] if GPU else []
with_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or triton and TRITON_INTERPRET=1")


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A span and a half, exactly two, less than a block, one number, none; one that starts off the grid of 16 bytes,
    one whose numbers do not lie side by side."""
    sizes, generator = (96, 128, 5, 1, 0), torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=generator) for size in sizes]
    found += [torch.randn(71, generator=generator)[1:], torch.randn(8, 6, generator=generator).t()]
    moved = [one.to("cuda" if GPU else "cpu", dtype) for one in found]
    moved[5] = torch.cat([moved[5][:1], moved[5]])[1:]
    return moved


def exact(tensors: list[Tensor]) -> float:
    return sum(float(one.double().square().sum()) for one in tensors)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16,), (torch.float32, torch.float16)], ids=str)
def test_every_number_counts_once(
    implementation: str, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "triton":
        from lmworks.kernels.training import grad_norm_triton

        monkeypatch.setattr(grad_norm_triton, "SPAN", 64)
        monkeypatch.setattr(grad_norm_triton, "BLOCK", 16)
    tensors = [tensor for dtype in dtypes for tensor in drawn(dtype)]
    found = sum_squares(tensors, implementation)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert float(found) == pytest.approx(exact(tensors), rel=1e-6)
    assert float(sum_squares(tensors, implementation)) == float(found)  # in the same order
    tensors[0][95] += 3  # the last of a span that is not full
    assert float(sum_squares(tensors, implementation)) == pytest.approx(exact(tensors), rel=1e-6)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("triton", marks=with_triton)])
def test_a_nan_is_seen(implementation: str) -> None:
    tensors = drawn()
    tensors[2][4] = torch.nan
    assert sum_squares(tensors, implementation).isnan()


def test_a_cpu_takes_torch() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    assert float(sum_squares(tensors)) == float(reference(tensors)) == 19
