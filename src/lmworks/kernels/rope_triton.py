"""Rotation of queries and keys in one kernel: a program takes one token and some of its heads, with shared angles."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .triton_support import power_of_two, tl, triton


@dataclass(frozen=True)
class Tiles:
    """Tile sizes, measured on an H200 (benchmarks/elementwise_gpu.py)."""

    heads: int = 16  # of a program, at most
    thread: int = 8  # elements of each half of a head per thread: 16 bytes of bf16


TILES = Tiles()


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, tiles: Tiles = TILES
) -> tuple[Tensor, Tensor]:
    """As `rope.rotate` of both; with `inverse`, by the opposite angles."""
    if q.dim() == 3:
        out_q, out_k = launch(q.unsqueeze(0), k.unsqueeze(0), cos, sin, inverse, tiles)
        return out_q.squeeze(0), out_k.squeeze(0)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    batch, seq, heads, head_dim = q.shape
    cos, sin = (x.contiguous().expand(batch, seq, 1, head_dim) for x in (cos, sin))  # may be shared by all sequences
    kv_heads, width = k.shape[2], power_of_two(head_dim // 2)
    part = min(tiles.heads, power_of_two(heads))
    rope_kernel[(batch * seq, triton.cdiv(heads, part) + triton.cdiv(kv_heads, part))](
        q,
        k,
        cos,
        sin,
        out_q,
        out_k,
        seq,
        heads,
        kv_heads,
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        HALF=head_dim // 2,
        WIDTH=width,
        PART=part,
        INVERSE=inverse,
        num_warps=max(1, min(8, part * width // (32 * tiles.thread))),
    )
    return out_q, out_k


@triton.jit
def rotate_half(x_ptr, out_ptr, head, heads, head_stride, cos, sin, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate heads of one token from x_ptr to out_ptr."""
    d = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (d < HALF)[None, :]
    a_ptr = x_ptr + head[:, None] * head_stride + d[None, :]
    a = tl.load(a_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(a_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    out_ptr += head[:, None] * (2 * HALF) + d[None, :]
    tl.store(out_ptr, a * cos - b * sin, mask=inside)
    tl.store(out_ptr + HALF, b * cos + a * sin, mask=inside)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    out_q_ptr,
    out_k_ptr,
    seq,
    heads,
    kv_heads,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    table_batch,
    table_seq,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // seq, token % seq
    d = tl.arange(0, WIDTH)
    table = batch * table_batch + position * table_seq + d
    cos = tl.load(cos_ptr + table, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table + HALF, mask=d < HALF, other=0.0)[None, :]  # the first half is −sin
    if INVERSE:
        sin = -sin
    parts = tl.cdiv(heads, PART)
    part, head = tl.program_id(1), tl.arange(0, PART)
    if part < parts:
        q = q_ptr + batch * q_batch + position * q_seq
        out = out_q_ptr + token * heads * (2 * HALF)
        rotate_half(q, out, part * PART + head, heads, q_head, cos, sin, HALF, WIDTH)
    else:
        k = k_ptr + batch * k_batch + position * k_seq
        out = out_k_ptr + token * kv_heads * (2 * HALF)
        rotate_half(k, out, (part - parts) * PART + head, kv_heads, k_head, cos, sin, HALF, WIDTH)
