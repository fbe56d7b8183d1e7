"""Triton kernels of `permute.unpermute`: a program computes one token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import power_of_two, tl, triton

COLUMNS = 2048  # of a step, at most


@triton.jit
def forward_kernel(rows, weights, back, out, N, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        total = tl.zeros((BN,), tl.float32)
        for choice in tl.static_range(TOP_K):
            row = tl.load(back + token * TOP_K + choice)
            part = tl.load(rows + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            if WEIGHTED:
                part *= tl.load(weights + token * TOP_K + choice).to(tl.float32)
            total += part
        tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def backward_kernel(grad, rows, weights, back, grad_rows, grad_weights, N, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for choice in tl.static_range(TOP_K):
        row = tl.load(back + token * TOP_K + choice)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
        products = tl.zeros((BN,), tl.float32)
        for first in range(0, N, BN):
            n = first + tl.arange(0, BN)
            g = tl.load(grad + token * N + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(grad_rows + row * N + n, (g * weight).to(grad_rows.dtype.element_ty), mask=n < N)
            if WEIGHTED:
                products += g * tl.load(rows + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        if WEIGHTED:
            tl.store(grad_weights + token * TOP_K + choice, tl.sum(products).to(grad_weights.dtype.element_ty))


def forward(rows: Tensor, weights: Tensor | None, back: Tensor, top_k: int) -> Tensor:
    tokens, hidden = len(back) // top_k, rows.shape[1]
    dtype = rows.dtype if weights is None else torch.result_type(rows, weights)
    out = torch.empty(tokens, hidden, dtype=dtype, device=rows.device)
    columns, warps = launch_options(hidden)
    forward_kernel[(tokens,)](
        rows.contiguous(), out if weights is None else weights.contiguous(), back, out, hidden, top_k,
        weights is not None, columns, num_warps=warps,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    rows: Tensor | None,
    weights: Tensor | None,
    back: Tensor,
    top_k: int,
    grad_rows: Tensor,
    grad_weights: Tensor | None,
) -> None:
    """Writes `grad_rows` and, with weights, `grad_weights`."""
    tokens, hidden = grad.shape
    columns, warps = launch_options(hidden)
    given = (grad if one is None else one.contiguous() for one in (rows, weights))
    backward_kernel[(tokens,)](
        grad, *given, back, grad_rows, grad if grad_weights is None else grad_weights, hidden, top_k,
        weights is not None, columns, num_warps=warps,
    )  # fmt: skip


def launch_options(hidden: int) -> tuple[int, int]:
    """Columns of a step and warps: 8 columns a thread, 16 bytes of bf16."""
    columns = min(COLUMNS, power_of_two(hidden))
    return columns, max(1, columns // 256)
