"""The product of `fixed_linear` on a GPU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import early, split_counters, tl, triton, wait


@dataclass(frozen=True)
class Cut:
    """How a product is cut: the same for every number of rows."""

    rows: int
    channels: int
    inputs: int  # of one step
    stages: int


CUTS = {4: Cut(32, 64, 32, 2), 2: Cut(64, 128, 64, 4)}  # by bytes of a weight
PROGRAMS = 128  # what stretches aim at where rows are few
FEW = 64  # rows up to which stretches are shared out among programs: changes who adds, not what


@triton.jit
def split_k_partial_sum(x, w, row, column, K, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Σ over steps first … last − 1 of x · wᵀ: (BM, BN) fp32."""
    k = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        there = step * BK + k < K
        a = tl.load(x + row[:, None] * K + (step * BK + k)[None, :], mask=there[None, :], other=0.0)
        b = tl.load(w + column[None, :] * K + (step * BK + k)[:, None], mask=there[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def finish(total, bias, out, place, n, inside, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "stretches"])
def fixed(x, w, bias, out, parts, tickets, M, N, K, stretches, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """x (M, K), w (N, K) → out (M, N)."""
    wait(EARLY)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.where(m < M, m, 0).to(tl.int64)
    column = tl.where(n < N, n, 0).to(tl.int64)
    place = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    steps = tl.cdiv(K, BK)
    each = tl.cdiv(steps, stretches)
    total = tl.zeros((BM, BN), tl.float32)
    if SHARED:
        mine = tl.program_id(2)
        size = M.to(tl.int64) * N
        last = tl.minimum(mine * each + each, steps)
        part = split_k_partial_sum(x, w, row, column, K, mine * each, last, BM, BN, BK)
        tl.store(parts + mine * size + place, part, mask=inside)
        ticket = tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads have written before one of them says so
        if tl.atomic_add(ticket, 1, sem="acq_rel") == stretches - 1:
            for other in range(stretches):
                total += tl.load(parts + other * size + place, mask=inside, other=0.0)
            finish(total, bias, out, place, n, inside, N, HAS_BIAS)
            tl.store(ticket, 0)  # as the next call expects it
    else:
        for mine in range(stretches):
            last = tl.minimum(mine * each + each, steps)
            total += split_k_partial_sum(x, w, row, column, K, mine * each, last, BM, BN, BK)
        finish(total, bias, out, place, n, inside, N, HAS_BIAS)


def fixed_rows(x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
    """x (rows, in) → (rows, out), in x's precision or, if `wide`, in fp32."""
    rows, inputs, channels = x.shape[0], x.shape[1], weight.shape[0]
    out = x.new_empty(rows, channels, dtype=torch.float32 if wide else None)
    if not rows:
        return out
    cut = CUTS[weight.element_size()]
    stretches = num_k_splits(channels, inputs, cut)
    shared = stretches > 1 and rows <= FEW
    grid = (triton.cdiv(rows, cut.rows), triton.cdiv(channels, cut.channels), stretches if shared else 1)
    parts = torch.empty(stretches, rows, channels, device=x.device) if shared else out
    tickets = split_counters(x.device) if shared else out
    fixed[grid](
        x.contiguous(), weight, out if bias is None else bias, out, parts, tickets, rows, channels, inputs, stretches,
        cut.rows, cut.channels, cut.inputs, shared, bias is not None, num_warps=4, num_stages=cut.stages,
        **early(x.device),
    )  # fmt: skip
    return out


def num_k_splits(channels: int, inputs: int, cut: Cut) -> int:
    """A power of two that fills the GPU with one tile of rows, each stretch at least eight steps long."""
    stretches = 1
    while triton.cdiv(channels, cut.channels) * stretches < PROGRAMS and inputs >= stretches * 16 * cut.inputs:
        stretches *= 2
    return stretches
