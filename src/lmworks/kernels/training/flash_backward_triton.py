"""The backward pass of flash attention on a GPU: two walks, neither of which adds into memory that others add into.

The scores were not kept. They are computed again, tile by tile, and turned into the weights of the softmax at once,
since its log-sum-exp was kept: P = exp(S − lse). With dO the gradient of the result O = P·V,

    dV = Pᵀ·dO,    dP = dO·Vᵀ,    dS = P ∘ (dP − D),    dQ = dS·K / √d,    dK = dSᵀ·Q / √d

where D = Σⱼ Pᵢⱼ dPᵢⱼ is what the softmax takes back from every score of a row: it holds Σⱼ Pᵢⱼ = 1. It needs no walk of
its own, as Σⱼ Pᵢⱼ (dOᵢ·vⱼ) = dOᵢ·Oᵢ.

A sum over keys (dQ) and sums over queries (dK, dV) want different walks. One walk could do both if it added its parts
of dQ into memory as it goes: 5 products a tile, but in an order that no two runs share. Two walks do 7, and give the
same bits every time:

    queries   a program holds queries and walks over their keys: D, then 3 products a tile; leaves dQ and D
    keys      a program holds keys and walks over the queries that see them, of all heads that share these keys: 4
              products a tile; leaves dK and dV, whole

Both follow the forward pass (`flash_forward_triton`): tiles that are seen in full are walked over without a mask.
In the second, tiles lie on their side, (keys, queries), so that Pᵀ and dSᵀ are ready in registers for the next product.
Products stand in the order in which the exponentials of one can be computed while the tensor cores do the next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from ..triton_support import tl, triton
from .flash_forward_triton import (
    LOG2E,
    Tiles,
    choose_tiles,
    describe,
    first_keys,
    fit,
    key_span,
    seen,
    store_tile,
    tile,
    width_of,
)


def launch(
    grad: Tensor,  # of the result, in its shape
    q: Tensor,  # (batch, seq, heads, head_dim)
    k: Tensor,  # (batch, seq, kv_heads, head_dim)
    v: Tensor,
    out: Tensor,
    lse: Tensor,  # (batch, heads, seq)
    starts: Tensor | None,  # (batch, seq) int32: where the document of a position begins
    ends: Tensor | None,  # and where the next one does
    window: int,
    scale: float,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad, q, k, v = fit(grad), fit(q), fit(k), fit(v)
    width = width_of(q)
    first, second = tiles or (choose_tiles("queries", width, q.dtype), choose_tiles("keys", width, q.dtype))
    dq, delta = launch_queries(grad, q, k, v, out, lse, starts, window, scale, first)
    return dq, *launch_keys(grad, q, k, v, lse, delta, ends, window, scale, second)


def launch_queries(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    window: int,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """(dQ, D), the latter as lse."""
    batch, seq, heads, _ = q.shape
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    queries_kernel[(triton.cdiv(seq, tiles.rows), batch * heads)](
        *(describe(x, tiles.rows) for x in (grad, q)),
        *(describe(x, tiles.keys) for x in (k, v)),
        *(describe(x, tiles.rows) for x in (out, dq)),
        lse,
        delta,
        starts,
        seq,
        scale,
        HEADS=heads,
        GROUP=heads // k.shape[2],
        WINDOW=window,
        WIDTH=width_of(q),
        **tiles.options(),
    )
    return dq, delta


def launch_keys(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    ends: Tensor | None,
    window: int,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """(dK, dV)."""
    batch, seq, heads, _ = q.shape
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    keys_kernel[(triton.cdiv(seq, tiles.keys), batch * k.shape[2])](
        *(describe(x, tiles.rows) for x in (grad, q)),
        *(describe(x, tiles.keys) for x in (k, v, dk, dv)),
        lse,
        delta,
        ends,
        seq,
        scale,
        HEADS=heads,
        GROUP=heads // k.shape[2],
        WINDOW=window,
        WIDTH=width_of(q),
        **tiles.options(),
    )
    return dk, dv


@triton.jit
def queries_kernel(
    grad_desc,
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    dq_desc,
    lse_ptr,
    delta_ptr,
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
    """dQ of some queries, and their D."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest walks begin first
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    kv_head = head // GROUP
    if starts_ptr is not None:
        starts_ptr += batch.to(tl.int64) * seq
    begin, whole, diagonal, end = key_span(first, starts_ptr, seq, WINDOW, ROWS, KEYS)
    queries = first + tl.arange(0, ROWS)
    low = first_keys(queries, starts_ptr, seq, WINDOW)

    grad = tile(grad_desc, batch, head, first, ROWS, WIDTH)
    out = tile(out_desc, batch, head, first, ROWS, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    place = tl.program_id(1).to(tl.int64) * seq + queries
    tl.store(delta_ptr + place, delta, mask=queries < seq)
    lse = tl.load(lse_ptr + place, mask=queries < seq, other=0.0) * LOG2E
    q = tile(q_desc, batch, head, first, ROWS, WIDTH)
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    if (WINDOW > 0) or (starts_ptr is not None):
        dq = walk_keys(
            dq, grad, q, k_desc, v_desc, batch, kv_head, begin, whole, queries, low, lse, delta, scale,
            True, KEYS, WIDTH,
        )  # fmt: skip
    dq = walk_keys(
        dq, grad, q, k_desc, v_desc, batch, kv_head, whole, diagonal, queries, low, lse, delta, scale,
        False, KEYS, WIDTH,
    )  # fmt: skip
    dq = walk_keys(
        dq, grad, q, k_desc, v_desc, batch, kv_head, diagonal, end, queries, low, lse, delta, scale,
        True, KEYS, WIDTH,
    )  # fmt: skip
    store_tile(dq_desc, batch, head, first, dq * scale, ROWS, WIDTH)


@triton.jit
def walk_keys(
    dq,
    grad,
    q,
    k_desc,
    v_desc,
    batch,
    head,
    begin,
    end,
    queries,
    low,
    lse,
    delta,
    scale,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add to dq what the keys begin … end say."""
    for start in tl.range(begin, end, KEYS):
        k = tile(k_desc, batch, head, start, KEYS, WIDTH)
        v = tile(v_desc, batch, head, start, KEYS, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        p = tl.exp2(scores * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = tl.where(seen(queries, low, start + tl.arange(0, KEYS)), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def last_queries(keys, ends_ptr, seq, WINDOW: tl.constexpr):
    """One past the last query that sees each of these keys. It never goes down from one key to the next."""
    high = keys * 0 + seq
    if WINDOW > 0:
        high = tl.minimum(keys + WINDOW, seq)
    if ends_ptr is not None:
        high = tl.minimum(high, tl.load(ends_ptr + keys, mask=keys < seq, other=seq))
    return high


@triton.jit
def keys_kernel(
    grad_desc,
    q_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_ptr,
    delta_ptr,
    ends_ptr,
    seq,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dK and dV of some keys, from all queries that see them. The first have the longest walks, and begin first."""
    first = tl.program_id(0) * KEYS
    batch, kv_head = tl.program_id(1) // (HEADS // GROUP), tl.program_id(1) % (HEADS // GROUP)
    if ends_ptr is not None:
        ends_ptr += batch.to(tl.int64) * seq
    # As in the forward pass: [begin, whole) across the diagonal, [whole, edge) without a mask, [edge, end) to where
    # windows and documents end. Queries beyond the sequence are zeros, and add nothing.
    end = last_queries(tl.minimum(first + KEYS, seq) - 1, ends_ptr, seq, WINDOW)
    begin = first // ROWS * ROWS
    whole = tl.minimum(tl.cdiv(first + KEYS - 1, ROWS) * ROWS, tl.cdiv(end, ROWS) * ROWS)
    edge = end
    if (WINDOW > 0) or (ends_ptr is not None):
        edge = tl.maximum(whole, last_queries(first, ends_ptr, seq, WINDOW) // ROWS * ROWS)

    k = tile(k_desc, batch, kv_head, first, KEYS, WIDTH)
    v = tile(v_desc, batch, kv_head, first, KEYS, WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    lse_ptr += batch.to(tl.int64) * HEADS * seq
    delta_ptr += batch.to(tl.int64) * HEADS * seq
    head = kv_head * GROUP
    dk, dv = walk_queries(
        dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, begin, whole, first, ends_ptr, seq, scale,
        True, GROUP, WINDOW, ROWS, KEYS, WIDTH,
    )  # fmt: skip
    dk, dv = walk_queries(
        dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, whole, edge, first, ends_ptr, seq, scale,
        False, GROUP, WINDOW, ROWS, KEYS, WIDTH,
    )  # fmt: skip
    if (WINDOW > 0) or (ends_ptr is not None):
        dk, dv = walk_queries(
            dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, edge, end, first, ends_ptr, seq, scale,
            True, GROUP, WINDOW, ROWS, KEYS, WIDTH,
        )  # fmt: skip
    store_tile(dk_desc, batch, kv_head, first, dk * scale, KEYS, WIDTH)
    store_tile(dv_desc, batch, kv_head, first, dv, KEYS, WIDTH)


@triton.jit
def walk_queries(
    dk,
    dv,
    k,
    v,
    grad_desc,
    q_desc,
    lse_ptr,
    delta_ptr,
    batch,
    head,
    begin,
    end,
    first,
    ends_ptr,
    seq,
    scale,
    MASKED: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add to dk and dv what the queries begin … end of GROUP heads say, head after head in one loop."""
    if MASKED:  # made here, not by the caller: registers are short, and the loop without a mask needs none of it
        keys = first + tl.arange(0, KEYS)
        high = last_queries(keys, ends_ptr, seq, WINDOW)
    steps = tl.cdiv(end - begin, ROWS)
    for step in tl.range(0, steps * GROUP):
        of = head + step // steps
        start = begin + step % steps * ROWS
        queries = start + tl.arange(0, ROWS)
        q = tile(q_desc, batch, of, start, ROWS, WIDTH)
        grad = tile(grad_desc, batch, of, start, ROWS, WIDTH)
        lse = tl.load(lse_ptr + of * seq + queries, mask=queries < seq, other=0.0) * LOG2E
        delta = tl.load(delta_ptr + of * seq + queries, mask=queries < seq, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        p = tl.exp2(scores * (scale * LOG2E) - lse[None, :])
        if MASKED:
            visible = (keys[:, None] <= queries[None, :]) & (queries[None, :] < high[:, None])
            p = tl.where(visible, p, 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv
