"""Masked means, variances and whitening against numpy in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmworks.align import masked_mean, masked_var, masked_whiten

VALUES = torch.tensor([[1.0, 2.0, 4.0, 9.0], [3.0, -5.0, 0.5, 7.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
KEPT = VALUES[MASK.bool()].double().numpy()


def test_mean_and_variance() -> None:
    assert masked_mean(VALUES, MASK).item() == pytest.approx(KEPT.mean())
    assert masked_var(VALUES, MASK).item() == pytest.approx(KEPT.var(ddof=1))
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(KEPT.var())
    torch.testing.assert_close(masked_mean(VALUES, MASK, dim=1), torch.tensor([7 / 3, -1.0]))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening(shift_mean: bool) -> None:
    white = masked_whiten(VALUES, MASK, shift_mean)
    kept = white[MASK.bool()].double().numpy()
    expected = (KEPT - KEPT.mean()) / KEPT.std(ddof=1) + (0 if shift_mean else KEPT.mean())
    np.testing.assert_allclose(kept, expected, rtol=1e-6)
    assert (white[~MASK.bool()] == 0).all()


def test_padding_reaches_neither_values_nor_gradients() -> None:
    values = VALUES.clone()
    values[0, 3], values[1, 3] = float("inf"), float("nan")
    values.requires_grad_()
    (masked_whiten(values, MASK) ** 3).sum().backward()
    assert values.grad is not None and values.grad.isfinite().all()
    assert (values.grad[~MASK.bool()] == 0).all() and (values.grad[MASK.bool()] != 0).all()
    torch.testing.assert_close(masked_whiten(values, MASK), masked_whiten(VALUES, MASK))


def test_empty_masks_and_single_positions() -> None:
    empty, one = torch.zeros_like(MASK), torch.zeros_like(MASK)
    one[0, 2] = 1
    assert masked_mean(VALUES, empty).item() == 0 and masked_var(VALUES, empty).item() == 0
    assert masked_mean(VALUES, one).item() == 4 and masked_var(VALUES, one).item() == 0
    assert masked_whiten(VALUES, one).isfinite().all()


def test_sums_are_in_fp32() -> None:
    """In bf16 a sum of ones stops at 256."""
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert masked_mean(ones, ones).item() == 1.0
    assert masked_mean(ones, ones).dtype == torch.float32
