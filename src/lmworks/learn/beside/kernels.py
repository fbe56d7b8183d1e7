"""Kernels beside ours, both in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

from .rows import Beside, Row, numbers


def triton_add(module: ModuleType) -> list[Row]:
    """The residual addition, which LMWorks' kernel does together with the RMSNorm after it."""
    import torch

    from ...kernels.rms_norm import add_rms_norm

    x, y = numbers(5, 200), numbers(5, 200, seed=1)
    ours, _ = add_rms_norm(x, y, torch.ones(200), 1e-6, "triton")
    return [Row("mean of |x + y|", float(module.add(x, y).abs().mean()), float(ours.abs().mean()))]


def triton_softmax(module: ModuleType) -> list[Row]:
    """LMWorks has the loss of a row without its softmax."""
    import torch

    from ...kernels.training.cross_entropy_triton import row_sums

    logits, targets = numbers(4, 1000), torch.arange(4) * 250
    log_sums, wanted = row_sums(logits, targets)
    yours = -module.softmax(logits).gather(1, targets[:, None]).log().mean()
    return [Row("cross-entropy of 4 rows of 1,000", float(yours), float((log_sums - wanted).mean()))]


def triton_matmul(module: ModuleType) -> list[Row]:
    from ...kernels.inference.linear_triton import linear

    x, weight = numbers(20, 70), numbers(50, 70, seed=1)
    yours, ours = module.matmul(x, weight.T.contiguous()), linear(x, weight)
    return [Row("mean of |x · weightᵀ|, (20, 70) times (70, 50)", *(float(one.abs().mean()) for one in (yours, ours)))]


def triton_attention(module: ModuleType) -> list[Row]:
    from ...kernels.training.flash_attention import flash_attention

    q, k, v = (numbers(2, 50, 32, seed=seed) for seed in range(3))
    ours = flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), implementation="triton")
    yours = module.attention(q, k, v)
    return [Row("mean of |output|, 2 heads, 50 positions", float(yours.abs().mean()), float(ours.abs().mean()))]


BESIDE: dict[str, Beside] = {
    "triton_add": triton_add,
    "triton_softmax": triton_softmax,
    "triton_matmul": triton_matmul,
    "triton_attention": triton_attention,
}
