"""Logits become their gradient where they lie: a program reads a row twice and writes it once (long rows in bf16: see
`cross_entropy_once_triton`).

    first pass    m = max z, s = Σ exp(z − m)            loss = m + log s − z[target]
    second pass   z ← exp(z − m − log s) − [target]

The second pass goes backwards: what the first one read last is still in the L2 cache. Exponents are of 2, which is the
instruction that a GPU has.

Where a vocabulary is cut over ranks, m + log s of all ranks is needed in between: `row_sums` is the first pass, and
`gradient_in_place` the second.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import power_of_two, tl, triton
from .cross_entropy_one_pass_triton import LN_2, LOG2_E, UNCOUNTED, fits, losses_once

# Measured on an H200, reads counted twice: 97 % of a copy's pace with 8192 for a vocabulary of 128k and 93 % with
# 4096, 88 and 100 % for one of 50k. With 8192, 16 warps or more are 7 points slower.
BLOCK, SHORT_BLOCK, WARPS = 8192, 4096, 8
LONG_ROW = 2**16  # columns from which a block is the longer one
SCALED = 4096  # elements of a program that scales


def loss_in_place(logits: Tensor, targets: Tensor, graded: bool, vocab: int) -> Tensor:
    """As `cross_entropy.chunk_loss`. A target that is no token makes the loss NaN."""
    if graded and fits(logits, vocab):
        return losses_once(logits, targets.contiguous(), vocab).sum()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    launch(loss_kernel, logits, targets.contiguous(), losses, vocab=vocab, GRADED=graded)
    return losses.sum()


def row_sums(logits: Tensor, targets: Tensor) -> Tensor:
    """(2, rows): log Σ exp of each row, and the logit of its target, 0 where that is −1."""
    found = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    launch(sums_kernel, logits, targets.contiguous(), found[0], found[1], vocab=logits.shape[1])
    return found


def gradient_in_place(logits: Tensor, targets: Tensor, log_sums: Tensor) -> None:
    """exp(logits − log_sums) − [target]; a target of −1 is none, and a log_sum of ∞ makes a row zero."""
    launch(gradient_kernel, logits, targets.contiguous(), log_sums.contiguous(), vocab=logits.shape[1])


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out ← x · factor, both contiguous; factor is a scalar on the device."""
    scale_kernel[(triton.cdiv(x.numel(), SCALED),)](x, factor, out, x.numel(), BLOCK=SCALED, num_warps=8)
    return out


def launch(kernel, logits: Tensor, *tensors: Tensor, vocab: int, **constants: bool) -> None:
    rows, columns = logits.shape
    block = min(BLOCK if columns >= LONG_ROW else SHORT_BLOCK, power_of_two(columns))
    warps = max(1, min(WARPS, block // 512))
    kernel[(rows,)](
        logits, *tensors, columns, vocab, logits.stride(0), **constants, BLOCK=block, num_warps=warps
    )  # fmt: skip


@triton.jit
def scale_kernel(x, factor, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def loss_kernel(
    logits, targets, losses, columns, vocab, stride, GRADED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    target = tl.load(targets + place)
    if target == UNCOUNTED:
        tl.store(losses + place, 0.0)
        if GRADED:
            for first in range(0, columns, BLOCK):
                column = first + tl.arange(0, BLOCK)
                tl.store(row + column, tl.zeros((BLOCK,), row.dtype.element_ty), mask=column < columns)
    else:
        inside = (target >= 0) & (target < vocab)
        wanted = tl.load(row + target, mask=inside, other=float("nan")).to(tl.float32)
        log2_sum = sum_of(row, columns, vocab, BLOCK)
        tl.store(losses + place, log2_sum * LN_2 - wanted)
        if GRADED:
            tl.debug_barrier()  # all have read before one writes
            write(row, target, log2_sum, columns, vocab, BLOCK)


@triton.jit
def sums_kernel(logits, targets, log_sums, wanted, columns, vocab, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    target = tl.load(targets + place)
    tl.store(wanted + place, tl.load(row + target, mask=target >= 0, other=0.0).to(tl.float32))
    tl.store(log_sums + place, sum_of(row, columns, vocab, BLOCK) * LN_2)


@triton.jit
def gradient_kernel(logits, targets, log_sums, columns, vocab, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    write(row, tl.load(targets + place), tl.load(log_sums + place) * LOG2_E, columns, vocab, BLOCK)


@triton.jit
def sum_of(row, columns, vocab, BLOCK: tl.constexpr):
    """log₂ Σ exp of the first `vocab` of a row. Every lane adds up its own columns; only the maximum is shared."""
    largest = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        z = powers(row, first + tl.arange(0, BLOCK), columns, vocab)
        larger = tl.maximum(largest, tl.max(z, 0))
        sums = sums * tl.exp2(largest - larger) + tl.exp2(z - larger)
        largest = larger
    return largest + tl.log2(tl.sum(sums, 0))


@triton.jit
def write(row, target, log2_sum, columns, vocab, BLOCK: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):
        column = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        p = tl.exp2(powers(row, column, columns, vocab) - log2_sum)
        gradient = tl.where(column == target, p - 1, p)
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=column < columns)


@triton.jit
def powers(row, column, columns, vocab):
    """Logits as powers of 2; −∞ after the first `vocab`.

    Two bounds: that of the memory divides by 16, so that loads stay wide; that of the vocabulary may not.
    """
    z = tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return tl.where(column < vocab, z * LOG2_E, float("-inf"))
