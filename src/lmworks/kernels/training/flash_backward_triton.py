"""The backward pass of flash attention on a GPU: two kernels without atomics.

Scores were not saved. They are computed again, tile by tile, and turned into softmax weights with the saved
log-sum-exp: P = exp(S − lse). With dO the gradient of the result O = P·V,

    dV = Pᵀ·dO,    dP = dO·Vᵀ,    dS = P ∘ (dP − D),    dQ = dS·K / √d,    dK = dSᵀ·Q / √d

where D = Σⱼ Pᵢⱼ dPᵢⱼ = dOᵢ·Oᵢ needs no pass of its own.

dQ is a sum over keys, dK and dV are sums over queries. One kernel could compute all if it added its parts of dQ into
memory: 5 products a tile, but in a nondeterministic order. Two kernels compute 7, deterministically:

    queries   a program holds queries and loops over their keys: D, then 3 products a tile; writes dQ and D
    keys      a program holds keys and loops over the queries that see them, of all heads that share these keys: 4
              products a tile; writes dK and dV

As in the forward pass (`flash_forward_triton`), tiles that are fully visible need no mask. In the second kernel tiles
are transposed, (keys, queries), so that Pᵀ and dSᵀ are in registers for the next product. Products are ordered so that
the exponentials of one overlap with the tensor cores' work on the next.
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
    first_visible_key,
    key_loop_bounds,
    load_tile,
    make_tma_compatible,
    store_tile,
    tensor_descriptor,
    visible_mask,
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
    grad, q, k, v = make_tma_compatible(grad), make_tma_compatible(q), make_tma_compatible(k), make_tma_compatible(v)
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
    """(dQ, D); D in the shape of lse."""
    batch, seq, heads, _ = q.shape
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    queries_kernel[(triton.cdiv(seq, tiles.rows), batch * heads)](
        *(tensor_descriptor(x, tiles.rows) for x in (grad, q)),
        *(tensor_descriptor(x, tiles.keys) for x in (k, v)),
        *(tensor_descriptor(x, tiles.rows) for x in (out, dq)),
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
        *(tensor_descriptor(x, tiles.rows) for x in (grad, q)),
        *(tensor_descriptor(x, tiles.keys) for x in (k, v, dk, dv)),
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
    """dQ and D of ROWS queries."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest loops are scheduled first
    batch, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    kv_head = head // GROUP
    if starts_ptr is not None:
        starts_ptr += batch.to(tl.int64) * seq
    begin, whole, diagonal, end = key_loop_bounds(first, starts_ptr, seq, WINDOW, ROWS, KEYS)
    queries = first + tl.arange(0, ROWS)
    low = first_visible_key(queries, starts_ptr, seq, WINDOW)

    grad = load_tile(grad_desc, batch, head, first, ROWS, WIDTH)
    out = load_tile(out_desc, batch, head, first, ROWS, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    place = tl.program_id(1).to(tl.int64) * seq + queries
    tl.store(delta_ptr + place, delta, mask=queries < seq)
    lse = tl.load(lse_ptr + place, mask=queries < seq, other=0.0) * LOG2E
    q = load_tile(q_desc, batch, head, first, ROWS, WIDTH)
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    if (WINDOW > 0) or (starts_ptr is not None):
        dq = accumulate_dq(
            dq, grad, q, k_desc, v_desc, batch, kv_head, begin, whole, queries, low, lse, delta, scale,
            True, KEYS, WIDTH,
        )  # fmt: skip
    dq = accumulate_dq(
        dq, grad, q, k_desc, v_desc, batch, kv_head, whole, diagonal, queries, low, lse, delta, scale,
        False, KEYS, WIDTH,
    )  # fmt: skip
    dq = accumulate_dq(
        dq, grad, q, k_desc, v_desc, batch, kv_head, diagonal, end, queries, low, lse, delta, scale,
        True, KEYS, WIDTH,
    )  # fmt: skip
    store_tile(dq_desc, batch, head, first, dq * scale, ROWS, WIDTH)


@triton.jit
def accumulate_dq(
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
    """Add the contribution of keys begin … end to dq."""
    for start in tl.range(begin, end, KEYS):
        k = load_tile(k_desc, batch, head, start, KEYS, WIDTH)
        v = load_tile(v_desc, batch, head, start, KEYS, WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        p = tl.exp2(scores * (scale * LOG2E) - lse[:, None])
        if MASKED:
            p = tl.where(visible_mask(queries, low, start + tl.arange(0, KEYS)), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def visible_query_end(keys, ends_ptr, seq, WINDOW: tl.constexpr):
    """One past the last query that sees each key; non-decreasing."""
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
    """dK and dV of KEYS keys. The first keys have the longest loops, and are scheduled first."""
    first = tl.program_id(0) * KEYS
    batch, kv_head = tl.program_id(1) // (HEADS // GROUP), tl.program_id(1) % (HEADS // GROUP)
    if ends_ptr is not None:
        ends_ptr += batch.to(tl.int64) * seq
    # As in the forward pass: [begin, whole) across the diagonal, [whole, edge) without a mask, [edge, end) up to the
    # end of windows and documents. Queries beyond the sequence are zeros and add nothing.
    end = visible_query_end(tl.minimum(first + KEYS, seq) - 1, ends_ptr, seq, WINDOW)
    begin = first // ROWS * ROWS
    whole = tl.minimum(tl.cdiv(first + KEYS - 1, ROWS) * ROWS, tl.cdiv(end, ROWS) * ROWS)
    edge = end
    if (WINDOW > 0) or (ends_ptr is not None):
        edge = tl.maximum(whole, visible_query_end(first, ends_ptr, seq, WINDOW) // ROWS * ROWS)

    k = load_tile(k_desc, batch, kv_head, first, KEYS, WIDTH)
    v = load_tile(v_desc, batch, kv_head, first, KEYS, WIDTH)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    lse_ptr += batch.to(tl.int64) * HEADS * seq
    delta_ptr += batch.to(tl.int64) * HEADS * seq
    head = kv_head * GROUP
    dk, dv = accumulate_dk_dv(
        dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, begin, whole, first, ends_ptr, seq, scale,
        True, GROUP, WINDOW, ROWS, KEYS, WIDTH,
    )  # fmt: skip
    dk, dv = accumulate_dk_dv(
        dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, whole, edge, first, ends_ptr, seq, scale,
        False, GROUP, WINDOW, ROWS, KEYS, WIDTH,
    )  # fmt: skip
    if (WINDOW > 0) or (ends_ptr is not None):
        dk, dv = accumulate_dk_dv(
            dk, dv, k, v, grad_desc, q_desc, lse_ptr, delta_ptr, batch, head, edge, end, first, ends_ptr, seq, scale,
            True, GROUP, WINDOW, ROWS, KEYS, WIDTH,
        )  # fmt: skip
    store_tile(dk_desc, batch, kv_head, first, dk * scale, KEYS, WIDTH)
    store_tile(dv_desc, batch, kv_head, first, dv, KEYS, WIDTH)


@triton.jit
def accumulate_dk_dv(
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
    """Add the contributions of queries begin … end of GROUP heads to dk and dv, in one loop."""
    if MASKED:  # computed here and not by the caller, to save registers in the loop without a mask
        keys = first + tl.arange(0, KEYS)
        high = visible_query_end(keys, ends_ptr, seq, WINDOW)
    steps = tl.cdiv(end - begin, ROWS)
    for step in tl.range(0, steps * GROUP):
        of = head + step // steps
        start = begin + step % steps * ROWS
        queries = start + tl.arange(0, ROWS)
        q = load_tile(q_desc, batch, of, start, ROWS, WIDTH)
        grad = load_tile(grad_desc, batch, of, start, ROWS, WIDTH)
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
