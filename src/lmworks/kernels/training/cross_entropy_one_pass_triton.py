"""Logits in bf16 become their gradient where they lie, and memory is read once.

A program has a multiprocessor to itself and keeps the end of its row in registers, two logits in each, from the sums to
the gradient: all of a vocabulary of 50k, not half of one of 128k. What is before that is read again, from the L2 cache:
the rows of all programs are 20 MB there. Where a block of the gradient has been written, the same registers take that
block of the program's next row, so that memory is at work while exponentials are.

Registers hold words and not logits, so words are taken apart three times: by 16, `again` and `once_more`, which are 16
too. A compiler that knew would take them apart once, and spill what it gets.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_support import multiprocessors, tl, triton

# What a compiler can do without spilling registers. On an H200 10 blocks were as fast, 6 blocks or 32 warps slower.
WARPS, HELD = 16, 13  # blocks in registers: 52 of the 128 that a thread has
THREAD = 4  # words of a thread in a block: 16 bytes
SHORTEST = 2**14  # logits of a row for which a whole multiprocessor is not too much

LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
UNCOUNTED = tl.constexpr(-100)  # cross_entropy.IGNORE


def fits(logits: Tensor, vocab: int) -> bool:
    """Rows of whole loads, and no block but the last with columns that are no tokens."""
    columns, stride = logits.shape[1], logits.stride(0)
    block = 2 * 32 * WARPS * THREAD
    aligned = columns % 8 == 0 and stride % 8 == 0 and logits.data_ptr() % 16 == 0
    return logits.dtype == torch.bfloat16 and columns >= SHORTEST and aligned and vocab > (columns - 1) // block * block


def losses_once(logits: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """The loss of each row, whose gradient takes its place."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = 32 * WARPS * THREAD
    again = max(0, triton.cdiv(columns // 2, block) - HELD)
    once_kernel[(min(rows, multiprocessors(logits.device)),)](
        logits, targets, losses, rows, vocab, logits.stride(0) // 2, 16, 16, WORDS=columns // 2, AGAIN=again,
        BLOCK=block, num_warps=WARPS,
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
def fetch(row, block, bound, BLOCK: tl.constexpr):
    """A block of a row of `bound` words."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < bound, other=0, eviction_policy="evict_first")


@triton.jit
def write(row, words, half, shift, block, vocab, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of a block, but for the target's −1."""
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
def once_kernel(
    logits, targets, losses, rows, vocab, stride, again, once_more,
    WORDS: tl.constexpr,  # of a row
    AGAIN: tl.constexpr,  # blocks that are read twice
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
        held = held + (fetch(words, block, WORDS, BLOCK),)  # type: ignore[assignment]  # noqa: RUF005
    for place in range(first, rows, programs):
        row = words.to(logits.dtype)
        target = tl.load(targets + place)
        counted = target != UNCOUNTED
        inside = (target >= 0) & (target < vocab)
        wanted = tl.load(row + target, mask=inside, other=float("nan")).to(tl.float32)
        # Every lane has a maximum and a sum of its own for what is not held.
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
        shift = tl.where(counted, log2_sum, float("inf"))  # of a row that does not count the gradient is 0
        for block in tl.static_range(AGAIN):
            here = tl.load(words + block * BLOCK + lane, eviction_policy="evict_first")
            write(row, here, once_more, shift, block, vocab, WORDS, BLOCK)
        bound = tl.where(place + programs < rows, WORDS, 0)
        following = ()
        for block in tl.static_range(AGAIN, BLOCKS):
            write(row, held[block - AGAIN], once_more, shift, block, vocab, WORDS, BLOCK)
            fresh = fetch(words + further, block, bound, BLOCK)
            following = following + (fresh,)  # type: ignore[assignment]  # noqa: RUF005
        held = following
        tl.debug_barrier()  # the target's column has been written
        at_target = tl.exp2(wanted * LOG2_E - shift) - 1
        tl.store(row + target, at_target.to(row.dtype.element_ty), mask=inside)
        words += further
