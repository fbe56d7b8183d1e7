"""The forward pass of flash attention on a GPU, and the tile sizes of all passes.

A program takes ROWS queries of one head and loops over their keys, KEYS at a time. Softmax needs the largest score of a
row and the sum over all of it, which are known at the end only; so the loop keeps, for every row, the largest score so
far m, the sum ℓ = Σ 2^(s − m), and acc = Σ 2^(s − m)·v. When a tile has a larger score m′, the sums are rescaled
(online softmax):

    ℓ ← ℓ · 2^(m − m′) + Σ 2^(s′ − m′),      acc ← acc · 2^(m − m′) + 2^(s′ − m′) · v′

In the end out = acc / ℓ, and the log-sum-exp m + log₂ ℓ is all that the backward pass needs of the scores. Scores are
in units of log 2 (log₂e/√d is multiplied in as the exponent is formed), since a GPU has 2^x and not e^x.

Tiles that all queries see in full need no mask, and almost all tiles are such. There are up to three loops, over

    [begin, whole)      tiles in which a window or a document begins for some of the queries
    [whole, diagonal)   tiles that every query sees in full
    [diagonal, end)     tiles that some queries see only in part: causal mask

Tiles are loaded and stored by tensor descriptors (TMA): rows beyond the sequence and columns beyond the head are loaded
as zeros and not stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..triton_support import power_of_two, tl, triton

MIN_SCORE = tl.constexpr(-1e30)  # below all scores, and finite: a row without visible keys gives 0 and not NaN
LOG2E = tl.constexpr(math.log2(math.e))

# --- tile sizes -------------------------------------------------------------------------------------------

# A program holds ROWS queries and loops over KEYS keys at a time (in the pass for dK and dV: the other way round).
# Groups of 4 warps feed Hopper's tensor cores 64 rows at a time. What bounds each choice:
#
#     registers   a thread has 255: accumulators take rows · width / threads of them, scores rows · keys / threads
#     shared      227 KiB of a multiprocessor: what its programs hold, and `stages` of each tile that they loop over
#     L2          every program reads all that it loops over: the fewer rows it holds, the more is read
#
# `benchmarks/flash_tune.py` tries others. Those for heads of 64 and 128 were the fastest on an H200, at 8192 positions
# (benchmarks/results/flash_tune.json, Triton 3.6). Heads of 32 take those of 64, and 256 was chosen by compiling for
# Hopper: neither was timed.


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of one pass."""

    rows: int  # queries in a tile
    keys: int  # keys in a tile
    warps: int
    stages: int  # of the software pipeline of loads
    registers: int | None = None  # limit per thread, so that two programs fit on a multiprocessor

    def options(self) -> dict[str, Any]:
        """Launch arguments."""
        common = {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}
        return common if self.registers is None else common | {"maxnreg": self.registers}


PASSES = ("forward", "queries", "keys")  # the two of the backward pass: dQ; dK and dV

# By pass and head width (head_dim rounded up to a power of two), for 16-bit dtypes.
HALF: dict[str, dict[int, Tiles]] = {
    "forward": {
        32: Tiles(128, 64, 4, 3),
        64: Tiles(128, 64, 4, 3),
        128: Tiles(128, 128, 8, 3),
        256: Tiles(128, 64, 8, 2),
    },
    "queries": {
        32: Tiles(128, 64, 8, 3),
        64: Tiles(128, 64, 8, 3),
        128: Tiles(128, 64, 8, 3),
        256: Tiles(64, 32, 8, 2),
    },
    "keys": {
        32: Tiles(64, 64, 4, 3),
        64: Tiles(64, 64, 4, 3),
        128: Tiles(64, 64, 4, 2),
        256: Tiles(32, 64, 8, 2),
    },
}
# fp32 uses no tensor cores (products are exact): it is for tests, and small tiles keep it in registers.
FULL = Tiles(32, 32, 4, 1)


def choose_tiles(name: str, width: int, dtype: torch.dtype) -> Tiles:
    """Tile sizes of a pass; heads narrower than 32 take those of 32."""
    return FULL if dtype == torch.float32 else HALF[name][max(width, min(HALF[name]))]


# --- the pass ---------------------------------------------------------------------------------------------


def width_of(x: Tensor) -> int:
    """Width of a tile: head_dim rounded up to a power of two."""
    return max(16, power_of_two(x.shape[-1]))


def make_tma_compatible(x: Tensor) -> Tensor:
    """x if TMA can read it (rows of whole 16 bytes that do not overlap), else a copy."""
    apart = all(step > 0 and step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    fits = apart and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def tensor_descriptor(x: Tensor, rows: int) -> Any:
    """For tiles of `rows` positions of a head of x (batch, seq, heads, head_dim)."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, rows, width_of(x)])


def launch(
    q: Tensor,  # (batch, seq, heads, head_dim)
    k: Tensor,  # (batch, seq, kv_heads, head_dim)
    v: Tensor,
    starts: Tensor | None,  # (batch, seq) int32: where the document of a position begins
    window: int,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """out, in the shape of q, and the log-sum-exp of scores, (batch, heads, seq) in fp32."""
    q, k, v = make_tma_compatible(q), make_tma_compatible(k), make_tma_compatible(v)
    batch, seq, heads, _ = q.shape
    width = width_of(q)
    tiles = tiles or choose_tiles("forward", width, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seq), dtype=torch.float32, device=q.device)
    forward_kernel[(triton.cdiv(seq, tiles.rows), batch * heads)](
        tensor_descriptor(q, tiles.rows),
        tensor_descriptor(k, tiles.keys),
        tensor_descriptor(v, tiles.keys),
        tensor_descriptor(out, tiles.rows),
        lse,
        starts,
        seq,
        scale,
        HEADS=heads,
        GROUP=heads // k.shape[2],
        WINDOW=window,
        WIDTH=width,
        **tiles.options(),
    )
    return out, lse


@triton.jit
def load_tile(descriptor, batch, head, first, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Positions first … first + LENGTH of a head: (LENGTH, WIDTH)."""
    return tl.reshape(descriptor.load([batch, head, first, 0]), (LENGTH, WIDTH))


@triton.jit
def store_tile(descriptor, batch, head, first, x, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    descriptor.store([batch, head, first, 0], tl.reshape(x.to(descriptor.dtype), (1, 1, LENGTH, WIDTH)))


@triton.jit
def first_visible_key(queries, starts_ptr, seq, WINDOW: tl.constexpr):
    """First visible key of each query; non-decreasing."""
    low = queries * 0
    if WINDOW > 0:
        low = tl.maximum(queries - WINDOW + 1, 0)
    if starts_ptr is not None:
        low = tl.maximum(low, tl.load(starts_ptr + queries, mask=queries < seq, other=0))
    return low


@triton.jit
def key_loop_bounds(first, starts_ptr, seq, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Bounds of the three loops over keys, for queries first … first + ROWS."""
    last = tl.minimum(first + ROWS, seq) - 1
    begin = first_visible_key(first, starts_ptr, seq, WINDOW) // KEYS * KEYS
    whole = tl.cdiv(first_visible_key(last, starts_ptr, seq, WINDOW), KEYS) * KEYS
    diagonal = tl.maximum(whole, (first + 1) // KEYS * KEYS)
    return begin, whole, diagonal, last + 1


@triton.jit
def visible_mask(queries, low, keys):
    """(queries, keys) bool."""
    return (keys[None, :] <= queries[:, None]) & (keys[None, :] >= low[:, None])


@triton.jit
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    starts_ptr,
    seq,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    # The last queries see the most keys and are scheduled first, so that no long loop is left at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    if starts_ptr is not None:
        starts_ptr += batch.to(tl.int64) * seq
    begin, whole, diagonal, end = key_loop_bounds(first, starts_ptr, seq, WINDOW, ROWS, KEYS)
    queries = first + tl.arange(0, ROWS)
    low = first_visible_key(queries, starts_ptr, seq, WINDOW)

    q = load_tile(q_desc, batch, head, first, ROWS, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), MIN_SCORE, tl.float32)
    scale *= LOG2E
    kv_head = head // GROUP
    if (WINDOW > 0) or (starts_ptr is not None):
        acc, row_sum, row_max = attend_keys(
            acc, row_sum, row_max, q, k_desc, v_desc, batch, kv_head, begin, whole, queries, low, scale,
            True, KEYS, WIDTH,
        )  # fmt: skip
    acc, row_sum, row_max = attend_keys(
        acc, row_sum, row_max, q, k_desc, v_desc, batch, kv_head, whole, diagonal, queries, low, scale,
        False, KEYS, WIDTH,
    )  # fmt: skip
    acc, row_sum, row_max = attend_keys(
        acc, row_sum, row_max, q, k_desc, v_desc, batch, kv_head, diagonal, end, queries, low, scale,
        True, KEYS, WIDTH,
    )  # fmt: skip
    row_sum = tl.where(queries < seq, row_sum, 1.0)  # queries beyond the sequence may see no key
    store_tile(out_desc, batch, head, first, acc / row_sum[:, None], ROWS, WIDTH)
    place = tl.program_id(1).to(tl.int64) * seq + queries
    tl.store(lse_ptr + place, (row_max + tl.log2(row_sum)) / LOG2E, mask=queries < seq)


@triton.jit
def attend_keys(
    acc,
    row_sum,
    row_max,
    q,
    k_desc,
    v_desc,
    batch,
    head,
    begin,
    end,
    queries,
    low,
    scale,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Online softmax over keys begin … end."""
    for start in tl.range(begin, end, KEYS):
        k = load_tile(k_desc, batch, head, start, KEYS, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(visible_mask(queries, low, start + tl.arange(0, KEYS)), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        v = load_tile(v_desc, batch, head, start, KEYS, WIDTH)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_sum, row_max
