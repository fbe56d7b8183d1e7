"""Gradient of an embedding: rows of gradients summed by token, in one pass over them.

Places are sorted by token, so that those of one token are a run, and cut into chunks of as many places each. A chunk is
a program's, whatever the tokens are: it adds rows up, and writes a sum to the table wherever a run ends.

    places   a a a b │ b b b b │ b b c d │ d e e e      chunks of 4
    written  a                   c           e
    parts          b   b         b     d   d

A run that goes over an edge leaves its parts in fp32, at most two a chunk: one that began before it, and one that
begins in it. A second launch adds them up, many at a time, in the chunk where the run begins. All sums are in the order
of places: nothing is added atomically, and the host never learns how many runs there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..triton_support import power_of_two, tl, triton


@dataclass(frozen=True)
class Tiles:
    """How the work is shared out. Reckoned, not measured: GPT-2's 65,536 tokens × 768 are 3,072 programs, about as many
    as the registers of an H200 hold at once, and each has 4 KiB on the way to it."""

    chunk: int = 64  # places of a program
    rows: int = 8  # of them at once: loads that do not wait for one another
    block: int = 256  # columns of a program, which is one warp: 16 bytes of bf16 in a thread
    parts: int = 16  # of a long run at once
    wide: int = 256  # columns of a program that adds parts up, 4 warps


TILES = Tiles()
NARROW = 2**16  # tokens that 16 bits tell apart: half the passes of a sort of 32


def launch(grad: Tensor, tokens: Tensor, vocab: int, tiles: Tiles = TILES) -> Tensor:
    """As `embedding.reference`: grad (…, hidden), tokens (…) → (vocab, hidden)."""
    hidden, count = grad.shape[-1], tokens.numel()
    out = grad.new_zeros(vocab, hidden)
    if not grad.numel():
        return out
    rows = grad.reshape(-1, hidden)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    # Of 16 bits the upper half is negative and comes first: any order will do that puts a token's places together.
    keys, order = tokens.flatten().to(torch.int16 if vocab <= NARROW else torch.int32).sort(stable=True)
    chunks = triton.cdiv(count, tiles.chunk)
    begun, going = torch.empty(2, chunks, hidden, dtype=torch.float32, device=grad.device)
    block, wide = (min(most, power_of_two(hidden)) for most in (tiles.block, tiles.wide))
    sum_kernel[(chunks, triton.cdiv(hidden, block))](
        rows, keys, order, out, begun, going, count, hidden, rows.stride(0),
        CHUNK=tiles.chunk, ROWS=tiles.rows, BLOCK=block, num_warps=1,
    )  # fmt: skip
    if chunks > 1:
        join_kernel[(chunks - 1, triton.cdiv(hidden, wide))](
            keys, out, begun, going, count, hidden, CHUNK=tiles.chunk, ROWS=tiles.parts, BLOCK=wide, num_warps=4
        )
    return out


@triton.jit
def row_of(key, hidden):
    """Where a token's row of the table begins; the product passes 2**31."""
    if key.dtype == tl.int16:
        return (key.to(tl.int64) & 0xFFFF) * hidden
    return key.to(tl.int64) * hidden


@triton.jit
def begins_from(keys, start, key):
    """Whether this token's run begins at `start` or later."""
    return (start == 0) | (tl.load(keys + start - 1, mask=start > 0, other=0) != key)


@triton.jit
def each_of(numbers, start, count, ROWS: tl.constexpr):
    """The next of them. After the last it is the last again and again: no run ends there, and nothing is written."""
    found = ()
    for i in tl.static_range(ROWS):
        found = found + (tl.load(numbers + tl.minimum(start + i, count - 1)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def rows_of(grad, places, stride, inside, ROWS: tl.constexpr):
    found = ()
    for i in tl.static_range(ROWS):
        found = found + (tl.load(grad + places[i] * stride, mask=inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def sum_kernel(
    grad, keys, order, out, begun, going, count, hidden, stride,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    start = chunk * CHUNK
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    part = chunk.to(tl.int64) * hidden + column
    key = tl.load(keys + start)
    whole = begins_from(keys, start, key)  # or else an earlier chunk has its beginning
    total = tl.zeros((BLOCK,), tl.float32)
    places = each_of(order, start, count, ROWS)
    for first in range(0, CHUNK, ROWS):
        # All loads come before the first store, behind which a compiler must leave them, and none waits for another.
        rows = rows_of(grad + column, places, stride, inside, ROWS)
        following = each_of(keys, start + first + 1, count, ROWS)
        places = each_of(order, start + first + ROWS, count, ROWS)
        for i in tl.static_range(ROWS):
            at = start + first + i
            total += rows[i].to(tl.float32)
            ends = (at + 1 == count) | ((at + 1 < count) & (following[i] != key))
            if ends:
                if whole:
                    tl.store(out + row_of(key, hidden) + column, total.to(out.dtype.element_ty), mask=inside)
                else:
                    tl.store(going + part, total, mask=inside)
            total = tl.where(ends, 0.0, total)
            whole = whole | ends
            key = following[i]
    after = start + CHUNK
    if (after < count) & (tl.load(keys + tl.minimum(after, count) - 1) == key):  # key is the next chunk's first
        if whole:
            tl.store(begun + part, total, mask=inside)
        else:
            tl.store(going + part, total, mask=inside)


@triton.jit
def join_kernel(
    keys, out, begun, going, count, hidden, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of every chunk but the last: the run that begins in it and goes on in others, where there is one."""
    chunk = tl.program_id(0)
    after = (chunk + 1) * CHUNK
    key = tl.load(keys + after - 1)
    if (tl.load(keys + after) == key) & begins_from(keys, chunk * CHUNK, key):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        row = chunk + 1 + tl.arange(0, ROWS)
        same = goes_on(keys, row * CHUNK, key, count)
        while tl.max(same.to(tl.int32), 0) > 0:
            further = goes_on(keys, (row + ROWS) * CHUNK, key, count)  # on its way beside the parts of this turn
            at = row.to(tl.int64)[:, None] * hidden + column[None, :]
            sums += tl.load(going + at, mask=same[:, None] & inside[None, :], other=0.0)
            row += ROWS
            same = further
        total = tl.load(begun + chunk.to(tl.int64) * hidden + column, mask=inside, other=0.0) + tl.sum(sums, 0)
        tl.store(out + row_of(key, hidden) + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def goes_on(keys, start, key, count):
    """Whether chunks that begin at `start` begin with this token."""
    return (start < count) & (tl.load(keys + start, mask=start < count, other=0) == key)
