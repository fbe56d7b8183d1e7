"""Cross entropy in place: logits are overwritten by their gradient.

Two passes: a program reads a row twice and writes it once.

    first pass    m = max z, s = Σ exp(z − m)            loss = m + log s − z[target]
    second pass   z ← exp(z − m − log s) − [target]

The second pass runs backwards, so that the end of the row is still in the L2 cache. Exponents are of base 2, as the
GPU's instruction. With a vocabulary that is sharded over ranks, m + log s of all ranks is needed in between: `row_sums`
is the first pass, and `gradient_in_place` the second.

One pass, for long rows in bf16: a program has a multiprocessor to itself and keeps the end of its row in registers from
the sums to the gradient, two logits in each: all of a vocabulary of 50k, less than half of one of 128k. The rest is
read again, from the L2 cache, where the rows of all programs are 20 MB. Once a block of the gradient is written, its
registers are loaded with that block of the program's next row, so that loads overlap with exponentials. Registers hold
words, not logits, and words are unpacked three times, by shifts of 16, `again` and `once_more`, which are 16 too: a
compiler that knew would unpack once, and spill the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_support import multiprocessors, power_of_two, tl, triton

# Measured on an H200, reads counted twice: 97 % of a copy's bandwidth with 8192 for a vocabulary of 128k and 93 % with
# 4096, 88 and 100 % for one of 50k. With 8192, 16 warps or more are 7 points slower.
BLOCK, SHORT_BLOCK, WARPS = 8192, 4096, 8
LONG_ROW = 2**16  # columns from which BLOCK is used
SCALED = 4096  # elements of a program of `scale_kernel`
# One pass: what a compiler can do without spilling registers. On an H200 10 blocks were as fast, 6 blocks or 32 warps
# slower.
ONE_PASS_WARPS, HELD_BLOCKS = 16, 13  # blocks in registers: 52 of the 128 that a thread has
WORDS_PER_THREAD = 4  # in a block: 16 bytes
MIN_ROW = 2**14  # logits from which a row may have a multiprocessor to itself
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
IGNORED = tl.constexpr(-100)  # cross_entropy.IGNORE


def loss_in_place(logits: Tensor, targets: Tensor, with_grad: bool, vocab: int) -> Tensor:
    """As `cross_entropy.chunk_loss`. A target that is no token makes the loss NaN."""
    if with_grad and one_pass_supports(logits, vocab):
        return one_pass_losses(logits, targets.contiguous(), vocab).sum()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    launch(loss_kernel, logits, targets.contiguous(), losses, vocab=vocab, WITH_GRAD=with_grad)
    return losses.sum()


def row_sums(logits: Tensor, targets: Tensor, vocab: int | None = None) -> Tensor:
    """(2, rows): log Σ exp of each row, and the logit of its target, 0 where that is −1.

    Columns after the first `vocab` are padding.
    """
    found = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    launch(sums_kernel, logits, targets.contiguous(), found[0], found[1], vocab=vocab or logits.shape[1])
    return found


def gradient_in_place(logits: Tensor, targets: Tensor, log_sums: Tensor, vocab: int | None = None) -> None:
    """exp(logits − log_sums) − [target]; a target of −1 is none, and a log_sum of ∞ makes a row zero."""
    launch(gradient_kernel, logits, targets.contiguous(), log_sums.contiguous(), vocab=vocab or logits.shape[1])


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
    logits, targets, losses, columns, vocab, stride, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    target = tl.load(targets + place)
    if target == IGNORED:
        tl.store(losses + place, 0.0)
        if WITH_GRAD:
            for first in range(0, columns, BLOCK):
                column = first + tl.arange(0, BLOCK)
                tl.store(row + column, tl.zeros((BLOCK,), row.dtype.element_ty), mask=column < columns)
    else:
        inside = (target >= 0) & (target < vocab)
        wanted = tl.load(row + target, mask=inside, other=float("nan")).to(tl.float32)
        log2_sum = log2_sum_exp(row, columns, vocab, BLOCK)
        tl.store(losses + place, log2_sum * LN_2 - wanted)
        if WITH_GRAD:
            tl.debug_barrier()  # all threads have read before one writes
            write_gradient(row, target, log2_sum, columns, vocab, BLOCK)


@triton.jit
def sums_kernel(logits, targets, log_sums, wanted, columns, vocab, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    target = tl.load(targets + place)
    tl.store(wanted + place, tl.load(row + target, mask=target >= 0, other=0.0).to(tl.float32))
    tl.store(log_sums + place, log2_sum_exp(row, columns, vocab, BLOCK) * LN_2)


@triton.jit
def gradient_kernel(logits, targets, log_sums, columns, vocab, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    write_gradient(row, tl.load(targets + place), tl.load(log_sums + place) * LOG2_E, columns, vocab, BLOCK)


@triton.jit
def log2_sum_exp(row, columns, vocab, BLOCK: tl.constexpr):
    """log₂ Σ exp over the first `vocab` of a row. Every lane sums its own columns; only the maximum is shared."""
    largest = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        z = log2_logits(row, first + tl.arange(0, BLOCK), columns, vocab)
        larger = tl.maximum(largest, tl.max(z, 0))
        sums = sums * tl.exp2(largest - larger) + tl.exp2(z - larger)
        largest = larger
    return largest + tl.log2(tl.sum(sums, 0))


@triton.jit
def write_gradient(row, target, log2_sum, columns, vocab, BLOCK: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    for block in range(blocks):
        column = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        p = tl.exp2(log2_logits(row, column, columns, vocab) - log2_sum)
        gradient = tl.where(column == target, p - 1, p)
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=column < columns)


@triton.jit
def log2_logits(row, column, columns, vocab):
    """Logits in units of log 2; −∞ after the first `vocab`.

    `columns` divides by 16, so that loads are vectorised; `vocab` may not.
    """
    z = tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return tl.where(column < vocab, z * LOG2_E, float("-inf"))


# --- one pass -------------------------------------------------------------------------------------------


def one_pass_supports(logits: Tensor, vocab: int) -> bool:
    """Aligned rows of bf16, with padding of the vocabulary in the last block only."""
    columns, stride = logits.shape[1], logits.stride(0)
    block = 2 * 32 * ONE_PASS_WARPS * WORDS_PER_THREAD
    aligned = columns % 8 == 0 and stride % 8 == 0 and logits.data_ptr() % 16 == 0
    return logits.dtype == torch.bfloat16 and columns >= MIN_ROW and aligned and vocab > (columns - 1) // block * block


def one_pass_losses(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """The loss of each row; logits are overwritten by their gradient."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = 32 * ONE_PASS_WARPS * WORDS_PER_THREAD
    again = max(0, triton.cdiv(columns // 2, block) - HELD_BLOCKS)
    one_pass_kernel[(min(rows, multiprocessors(logits.device)),)](
        logits, targets, losses, rows, vocab, logits.stride(0) // 2, 16, 16, WORDS=columns // 2, AGAIN=again,
        BLOCK=block, num_warps=ONE_PASS_WARPS,
    )  # fmt: skip
    return losses


@triton.jit
def low_of(words, half):
    """The first of two logits, in fp32."""
    return (words << half).to(tl.float32, bitcast=True)


@triton.jit
def high_of(words, half):
    return (words & (-1 << half)).to(tl.float32, bitcast=True)


@triton.jit
def load_block(row, block, bound, BLOCK: tl.constexpr):
    """A block of a row of `bound` words."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < bound, other=0, eviction_policy="evict_first")


@triton.jit
def write_block(row, words, half, shift, block, vocab, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the gradient of a block, without the target's −1."""
    low = tl.exp2(low_of(words, half) * LOG2_E - shift)
    high = tl.exp2(high_of(words, half) * LOG2_E - shift)
    column = 2 * block * BLOCK + tl.arange(0, 2 * BLOCK)
    both = tl.interleave(low, high)
    if (block + 1) * BLOCK >= WORDS:
        both = tl.where(column < vocab, both, 0.0)
        tl.store(row + column, both.to(row.dtype.element_ty), mask=column < 2 * WORDS)
    else:
        tl.store(row + column, both.to(row.dtype.element_ty))


@triton.jit(do_not_specialize=["again", "once_more"])
def one_pass_kernel(
    logits, targets, losses, rows, vocab, stride, again, once_more,
    WORDS: tl.constexpr,  # of a row
    AGAIN: tl.constexpr,  # blocks that are not held, and read twice
    BLOCK: tl.constexpr,  # words
):  # fmt: skip
    BLOCKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    first, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    last = 2 * ((BLOCKS - 1) * BLOCK + lane)  # columns of the low halves of the last block
    further = programs.to(tl.int64) * stride  # words to the program's next row
    words = logits.to(tl.pointer_type(tl.int32)) + first.to(tl.int64) * stride
    held = ()
    for block in tl.static_range(AGAIN, BLOCKS):
        held = held + (load_block(words, block, WORDS, BLOCK),)  # type: ignore[assignment]  # noqa: RUF005
    for place in range(first, rows, programs):
        row = words.to(logits.dtype)
        target = tl.load(targets + place)
        counted = target != IGNORED
        inside = (target >= 0) & (target < vocab)
        wanted = tl.load(row + target, mask=inside, other=float("nan")).to(tl.float32)
        # Every lane has its own maximum and sum of the blocks that are not held.
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for block in tl.static_range(AGAIN):
            here = tl.load(words + block * BLOCK + lane, eviction_policy="evict_last")
            low, high = low_of(here, 16) * LOG2_E, high_of(here, 16) * LOG2_E
            higher = tl.maximum(top, tl.maximum(low, high))
            sums = sums * tl.exp2(top - higher) + tl.exp2(low - higher) + tl.exp2(high - higher)
            top = higher
        most = top
        for block in tl.static_range(AGAIN, BLOCKS):
            low, high = low_of(held[block - AGAIN], 16), high_of(held[block - AGAIN], 16)
            if block == BLOCKS - 1:
                low = tl.where(last < vocab, low, float("-inf"))
                high = tl.where(last + 1 < vocab, high, float("-inf"))
            most = tl.maximum(most, tl.maximum(low, high) * LOG2_E)
        largest = tl.max(most, 0)
        sums = sums * tl.exp2(top - largest)
        for block in tl.static_range(AGAIN, BLOCKS):
            low = tl.exp2(low_of(held[block - AGAIN], again) * LOG2_E - largest)
            high = tl.exp2(high_of(held[block - AGAIN], again) * LOG2_E - largest)
            if block == BLOCKS - 1:
                low = tl.where(last < vocab, low, 0.0)
                high = tl.where(last + 1 < vocab, high, 0.0)
            sums += low + high
        log2_sum = largest + tl.log2(tl.sum(sums, 0))
        tl.store(losses + place, tl.where(counted, log2_sum * LN_2 - wanted, 0.0))
        shift = tl.where(counted, log2_sum, float("inf"))  # the gradient of an ignored row is 0
        for block in tl.static_range(AGAIN):
            here = tl.load(words + block * BLOCK + lane, eviction_policy="evict_first")
            write_block(row, here, once_more, shift, block, vocab, WORDS, BLOCK)
        bound = tl.where(place + programs < rows, WORDS, 0)
        following = ()
        for block in tl.static_range(AGAIN, BLOCKS):
            write_block(row, held[block - AGAIN], once_more, shift, block, vocab, WORDS, BLOCK)
            fresh = load_block(words + further, block, bound, BLOCK)
            following = following + (fresh,)  # type: ignore[assignment]  # noqa: RUF005
        held = following
        tl.debug_barrier()  # the target's column has been written
        at_target = tl.exp2(wanted * LOG2_E - shift) - 1
        tl.store(row + target, at_target.to(row.dtype.element_ty), mask=inside)
        words += further
