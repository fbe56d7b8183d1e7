"""Triton kernels of a mixture of experts: routing, grouping of tokens by expert, grouped products, weighted sum.

    router logits → `route_kernel`: top-k experts and weights of each token
    experts of all (token, choice) pairs → `group_kernel`: pairs in the order of their experts, cut into blocks of one
    rows → `grouped_kernel`: gate and up products with SwiGLU, then down products times routing weights
    results of the pairs → `combine_kernel`: sum over the choices of a token, and the shared experts' result

Nothing is read on the host, so that a CUDA graph can hold all of it; rows are padded in registers only. Experts without
tokens are not read. Up to MAX_PAIRS_ALONE pairs, each has programs of its own: few of them share an expert, and a
matrix-vector product needs no order. Sums are added in a fixed order, and the result is deterministic. `invariant`: a
row's sums are added in the same order in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..training.float8_triton import quantize_rows
from ..triton_support import PDL_MAX_PROGRAMS, pdl_options, pdl_wait, power_of_two, tl, triton
from .linear_triton import channels_of, write
from .quantized import FP8

MAX_PAIRS_ALONE = 32
SORT_CHUNK, SORT_TILE = 1024, 128  # pairs of a program of `group_kernel` where they are many, and those ranked at once
COUNT_TILE = 1024  # pairs counted at once
ALIGNED = 4  # int32 numbers of 16 bytes: Triton compiles a kernel again for a pointer that is not so aligned
MAX_PAIRS_UNCOUNTED = 8192  # up to which every program of `group_kernel` counts all pairs itself


# --- routing ----------------------------------------------------------------------------------------------


@triton.jit
def route_kernel(logits, bias, ids, weights, routed_scale, E, K: tl.constexpr, GROUPS: tl.constexpr,
                 BG: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr,
                 HAS_BIAS: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """logits (tokens, E) → ids and weights (tokens, K), one token a program; as model.moe.MoE.route."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BE)
    inside = expert < E
    logit = tl.load(logits + token * E + expert, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, -float("inf"))
    if GROUPS > 1:
        kept = in_best_groups(choice, expert, E // GROUPS, GROUPS, BG, TOP_GROUPS, SIGMOID)
        choice = tl.where(kept, choice, -float("inf"))
    k = tl.arange(0, BK)
    chosen = tl.zeros((BK,), tl.int32)
    weight = tl.zeros((BK,), tl.float32)
    for place in tl.static_range(K):
        best = tl.argmax(choice, 0)
        chosen = tl.where(k == place, best, chosen)
        weight = tl.where(k == place, tl.sum(tl.where(expert == best, score, 0.0)), weight)
        choice = tl.where(expert == best, -float("inf"), choice)
    if NORM:
        weight = weight / tl.sum(weight)
    tl.store(ids + token * K + k, chosen, mask=k < K)
    tl.store(weights + token * K + k, weight * routed_scale, mask=k < K)


@triton.jit
def in_best_groups(choice, expert, SIZE, GROUPS: tl.constexpr, BG: tl.constexpr, TOP_GROUPS: tl.constexpr,
                   SIGMOID: tl.constexpr):  # fmt: skip
    """Whether an expert's group is one of the best: by its best expert, or with sigmoid scores by its best two."""
    group = tl.arange(0, BG)
    quality = tl.full((BG,), -float("inf"), tl.float32)
    for one in tl.static_range(GROUPS):
        member = tl.where(expert // SIZE == one, choice, -float("inf"))
        best = tl.max(member)
        if SIGMOID:
            best += tl.max(tl.where(expert == tl.argmax(member, 0), -float("inf"), member))
        quality = tl.where(group == one, best, quality)
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best_group = tl.argmax(quality, 0)
        kept = kept | (expert // SIZE == best_group)
        quality = tl.where(group == best_group, -float("inf"), quality)
    return kept


# --- grouping: a counting sort ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["P"])
def count_kernel(ids, counts, P, CHUNK: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr):
    """counts (chunks, BE): how many pairs of each chunk chose each expert."""
    pdl_wait(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < P, other=0)
    tl.store(counts + tl.program_id(0) * BE + tl.arange(0, BE), tl.histogram(expert, BE, mask=pair < P))


@triton.jit(do_not_specialize=["P", "chunks"])
def group_kernel(ids, counts, order, starts, block_expert, block_row, P, chunks, COUNTED: tl.constexpr,
                 CHUNK: tl.constexpr, TILE: tl.constexpr, COUNT_TILE: tl.constexpr, BM: tl.constexpr,
                 BE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ids (P) → order (P): pairs, stably sorted by expert; a program places those of its chunk.

    The first one also writes `starts` (2 + BE): the number of blocks, where each expert's pairs begin, and P; and of
    every block (at most BM pairs of one expert), which expert's it is and where it begins.
    """
    pdl_wait(PDL)
    chunk = tl.program_id(0)
    total = tl.zeros((BE,), tl.int32)
    before = tl.zeros((BE,), tl.int32)
    expert = tl.arange(0, BE)
    if COUNTED:
        for other in range(chunks):
            count = tl.load(counts + other * BE + expert)
            total += count
            before += tl.where(other < chunk, count, 0)
    else:
        for first in range(0, P, COUNT_TILE):
            pair = first + tl.arange(0, COUNT_TILE)
            mine = tl.load(ids + pair, mask=pair < P, other=0)
            total += tl.histogram(mine, BE, mask=pair < P)
            before += tl.histogram(mine, BE, mask=pair < tl.minimum(P, chunk * CHUNK))
    start = tl.cumsum(total, 0) - total
    if chunk == 0:
        tl.store(starts + 1 + expert, start)
        tl.store(starts + 1 + BE, P)
        blocks = tl.cdiv(total, BM)
        first_block = tl.cumsum(blocks, 0) - blocks
        for i in range(tl.max(blocks)):
            tl.store(block_expert + first_block + i, expert, mask=i < blocks)
            tl.store(block_row + first_block + i, start + i * BM, mask=i < blocks)
        tl.store(starts, tl.sum(blocks))
    place = start + before
    for tile in range(CHUNK // TILE):
        first = chunk * CHUNK + tile * TILE
        pair = first + tl.arange(0, TILE)
        mine = tl.load(ids + pair, mask=pair < P, other=BE)
        theirs = tl.load(ids + pair, mask=pair < P, other=BE)
        earlier = (mine[:, None] == theirs[None, :]) & (pair[:, None] > pair[None, :])
        chose = mine[:, None] == expert[None, :]
        slot = tl.sum(tl.where(chose, place[None, :], 0), 1) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + slot, pair, mask=pair < P)
        place += tl.sum(chose.to(tl.int32), 0)


# --- products -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["P"])
def grouped_kernel(x, row_scale, w, scale, pair_weights, out, order, starts, block_expert, block_row, P, N, K,
                   distance: tl.int64, TOP_K: tl.constexpr, UP: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """W · xᵀ of a block of pairs with their expert's weights, w (experts, N, K).

    `UP`: x (tokens, K) → out (P, N / 2) in the order of experts, silu(gate) · up.
    Else: x (P, K) in that order → out (P, N) in the order of pairs, times their routing weights.
    `KIND`: "wide", "int8" (weights, times scale (experts, N)) or "fp8" (x too, times the scale of its row).
    """
    pdl_wait(PDL)
    n = channels_of(tl.program_id(0), N, BN, UP)
    block = tl.program_id(1)
    if block >= tl.load(starts):  # the grid has as many blocks as there can be
        return
    expert = tl.load(block_expert + block)
    slot = tl.load(block_row + block) + tl.arange(0, BM)
    inside = slot < tl.load(starts + expert + 2)
    pair = tl.load(order + slot, mask=inside, other=0)
    source = (pair // TOP_K if UP else slot).to(tl.int64)
    source = tl.where(inside, source, 0)
    row = expert.to(tl.int64) * N + tl.where(n < N, n, 0)
    at = row * K
    if UP:
        at = place_of(expert, n, N, K, distance)
    k = tl.arange(0, BK)
    sums = tl.zeros((BN, BM), tl.float32)
    for first in range(0, K, BK):
        there = first + k < K
        tile = tl.load(w + at[:, None] + (first + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + source[None, :] * K + (first + k)[:, None], mask=there[:, None], other=0.0)
        if KIND == "fp8":  # promoted to fp32 every step, as in `few_rows_kernel`
            sums = tl.dot(tile, part, sums, max_num_imprecise_acc=BK)
        else:
            sums = tl.dot(tile.to(part.dtype), part, sums, input_precision="ieee")
    if KIND != "wide":
        sums *= tl.load(scale + row)[:, None]
    if KIND == "fp8":
        sums *= tl.load(row_scale + source)[None, :]
    if UP:
        write(sums, out, tl.where(inside, slot, P), n, P, N, True)
    else:
        sums *= tl.load(pair_weights + pair, mask=inside, other=0.0)[None, :]
        write(sums, out, tl.where(inside, pair, P), n, P, N, False)


@triton.jit
def place_of(expert, n, N, K, distance):
    """Where a channel's weights begin, from the gates of the first expert: ups are a tensor of their own."""
    n = tl.where(n < N, n, 0)
    first = expert.to(tl.int64) * (N // 2) * K
    return first + n.to(tl.int64) * K + tl.where(n < N // 2, 0, distance)


@triton.jit
def alone_up_kernel(x, row_scale, w, scale, ids, out, N, K, distance: tl.int64, TOP_K: tl.constexpr,
                    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """As `grouped_kernel` with `UP` for one pair a program, without an order: out (P, N / 2) is in that of pairs."""
    n = channels_of(tl.program_id(0), N, BN, True)
    pair = tl.program_id(1)
    pdl_wait(PDL)
    expert = tl.load(ids + pair)
    row = expert.to(tl.int64) * N + tl.where(n < N, n, 0)
    at = place_of(expert, n, N, K, distance)
    k = tl.arange(0, BK)
    sums = tl.zeros((BN, BK), tl.float32)
    for first in range(0, K, BK):
        there = first + k < K
        tile = tl.load(w + at[:, None] + (first + k)[None, :], mask=there[None, :], other=0.0)
        part = tl.load(x + (pair // TOP_K).to(tl.int64) * K + first + k, mask=there, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * part[None, :]
    total = tl.sum(sums, axis=1)
    if KIND != "wide":
        total *= tl.load(scale + row)
    if KIND == "fp8":
        total *= tl.load(row_scale + pair // TOP_K)
    write(total[:, None], out, pair + tl.arange(0, 1), n, pair + 1, N, True)


@triton.jit
def alone_down_kernel(x, row_scale, w, scale, ids, pair_weights, shared, out, N, K, TOP_K: tl.constexpr,
                      KIND: tl.constexpr, HAS_SHARED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      PDL: tl.constexpr):  # fmt: skip
    """The weighted sum of a token's experts in one program: x (P, K) in the order of pairs → out (tokens, N)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.program_id(1)
    pdl_wait(PDL)
    k = tl.arange(0, BK)
    sums = tl.zeros((BN, BK), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        weight = tl.load(pair_weights + pair)
        row = tl.load(ids + pair).to(tl.int64) * N + tl.where(n < N, n, 0)
        if KIND == "fp8":
            weight *= tl.load(row_scale + pair)
        factor = tl.full((BN,), 1.0, tl.float32)
        if KIND != "wide":
            factor = tl.load(scale + row)
        for first in range(0, K, BK):
            there = first + k < K
            tile = tl.load(w + row[:, None] * K + (first + k)[None, :], mask=there[None, :], other=0.0)
            part = tl.load(x + pair.to(tl.int64) * K + first + k, mask=there, other=0.0).to(tl.float32)
            sums += tile.to(tl.float32) * (part * weight)[None, :] * factor[:, None]
    total = tl.sum(sums, axis=1)
    place = token.to(tl.int64) * N + n
    if HAS_SHARED:
        total += tl.load(shared + place, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def combine_kernel(results, shared, out, N, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr, BN: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    """Σ over the choices of a token of results (tokens, TOP_K, N), plus `shared` (tokens, N)."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(TOP_K):
        total += tl.load(results + (token * TOP_K + choice) * N + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


# --- launches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """How a router chooses (model.moe.MoE.route)."""

    top_k: int
    sigmoid: bool = False
    norm: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class ExpertWeights:
    """In half precision, or in int8 or e4m3 with scales of output channels."""

    gate: Tensor  # (experts, ffn, hidden)
    up: Tensor  # the same
    down: Tensor  # (experts, hidden, ffn)
    gate_up_scale: Tensor | None = None  # (experts, 2 · ffn) fp32
    down_scale: Tensor | None = None  # (experts, hidden)


@dataclass(frozen=True)
class Tile:
    """The part of a grouped product that a program computes."""

    pairs: int
    channels: int
    inputs: int  # of one step
    stages: int
    warps: int


# Tuned on an H200 for 8 of 128 experts of Qwen3-30B-A3B in bf16 (benchmarks/experts_tune.py).
ALONE_UP, ALONE_DOWN = Tile(1, 4, 1024, stages=1, warps=4), Tile(1, 8, 1024, stages=1, warps=4)
BATCH_INVARIANT = Tile(16, 128, 64, stages=4, warps=4)
FP32 = Tile(16, 64, 32, stages=2, warps=4)
TILES = {  # by the mean of pairs that an expert has, up to which they are fastest
    4.0: Tile(8, 128, 128, stages=4, warps=4),
    8.0: Tile(16, 128, 64, stages=4, warps=4),
    32.0: Tile(32, 128, 64, stages=4, warps=4),
    96.0: Tile(64, 128, 64, stages=4, warps=8),
    math.inf: Tile(128, 256, 64, stages=4, warps=8),
}


@dataclass(frozen=True)
class Blocks:
    """Pairs in the order of their experts, cut into blocks of one expert."""

    order: Tensor
    starts: Tensor
    expert: Tensor
    row: Tensor
    most: int  # blocks there can be


def grouped_tile(pairs: int, experts: int, itemsize: int, invariant: bool) -> Tile:
    if itemsize == 4:
        return FP32
    return BATCH_INVARIANT if invariant else next(tile for mean, tile in TILES.items() if pairs <= mean * experts)


def experts(
    x: Tensor,
    logits: Tensor,
    weights: ExpertWeights,
    routing: Routing,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """x (tokens, hidden) through the chosen experts, plus `shared`: (tokens, hidden).

    logits (tokens, experts). With e4m3 weights inputs of both products are e4m3 too, with a scale for each row.
    """
    x, pairs = x.contiguous(), x.shape[0] * routing.top_k
    ids, pair_weights = route(logits, routing, bias)
    up = Product(weights.gate, weights.gate_up_scale, weights.up)
    down = Product(weights.down, weights.down_scale)
    inner = x.new_empty(pairs, down.inputs)
    if pairs <= MAX_PAIRS_ALONE and not invariant:
        launch_alone_up(x, up, ids, inner, ALONE_UP)
        return launch_alone_down(inner, down, ids, pair_weights, shared, torch.empty_like(x), ALONE_DOWN)
    tile = grouped_tile(pairs, len(weights.down), x.itemsize, invariant)
    blocks = group(ids, len(weights.down), tile.pairs)
    launch_grouped(x, up, pair_weights, inner, blocks, tile, routing.top_k, up=True)
    results = x.new_empty(pairs, x.shape[1])
    launch_grouped(inner, down, pair_weights, results, blocks, tile, routing.top_k, up=False)
    return combine(results, shared, routing.top_k)


@dataclass(frozen=True)
class Product:
    """One matrix of all experts (experts, N, K), or gates and ups (experts, N / 2, K) of which the kernels take one for
    the gates and the distance of the other; and scales (experts, N) if it is quantized."""

    w: Tensor
    scale: Tensor | None = None
    ups: Tensor | None = None

    @property
    def kind(self) -> str:
        return "fp8" if self.w.dtype == FP8 else "int8" if self.w.dtype == torch.int8 else "wide"

    @property
    def channels(self) -> int:
        return self.w.shape[1] * (1 if self.ups is None else 2)

    @property
    def inputs(self) -> int:
        return self.w.shape[2]

    @property
    def distance(self) -> int:
        """Elements from the gates to the ups, less those of the gates of one expert."""
        assert self.ups is not None
        bytes_between = self.ups.data_ptr() - self.w.data_ptr()
        return bytes_between // self.w.itemsize - self.w.shape[1] * self.inputs

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, str]:
        """What a kernel reads: x, its rows' scales, weights, their scales; scales that are not there are never read."""
        scale = x if self.scale is None else self.scale
        if self.kind != "fp8":
            return x, x, self.w, scale, self.kind
        values, row_scale = quantize_rows(x, FP8)
        return values, row_scale, self.w, scale, self.kind


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token: (tokens, top_k) each."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, device=logits.device)
    route_kernel[(tokens,)](
        logits.contiguous(), logits if bias is None else bias, ids, weights, routing.scale, experts, routing.top_k,
        routing.groups, power_of_two(routing.groups), routing.top_groups, routing.sigmoid, routing.norm,
        bias is not None, power_of_two(experts), power_of_two(routing.top_k),
        **pdl_options(logits.device, tokens <= PDL_MAX_PROGRAMS), num_warps=1,
    )  # fmt: skip
    return ids, weights


def group(ids: Tensor, experts: int, pairs_of_block: int) -> Blocks:
    """Sort pairs by expert."""
    pairs, width, device = ids.numel(), power_of_two(experts), ids.device
    counted = pairs > MAX_PAIRS_UNCOUNTED
    chunk = SORT_CHUNK if counted else SORT_TILE
    chunks, most = triton.cdiv(pairs, chunk), min(pairs, experts + pairs // pairs_of_block)
    sizes = [ALIGNED * triton.cdiv(size, ALIGNED) for size in (pairs, width + 2, most, most)]
    order, starts, expert, row = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    counts = ids
    if counted:
        counts = torch.empty(chunks, width, dtype=torch.int32, device=device)
        count_kernel[(chunks,)](ids, counts, pairs, SORT_CHUNK, width, **pdl_options(device))
    group_kernel[(chunks,)](
        ids, counts, order, starts, expert, row, pairs, chunks, counted, chunk, SORT_TILE, COUNT_TILE, pairs_of_block,
        width, **pdl_options(device), num_warps=8,
    )  # fmt: skip
    return Blocks(order, starts, expert, row, most)


def launch_grouped(
    x: Tensor, product: Product, weights: Tensor, out: Tensor, blocks: Blocks, tile: Tile, top_k: int, up: bool
) -> None:
    *operands, kind = product.operands(x)
    grid = (triton.cdiv(product.channels, tile.channels), blocks.most)
    grouped_kernel[grid](
        *operands, weights, out, blocks.order, blocks.starts, blocks.expert, blocks.row, weights.numel(),
        product.channels, product.inputs, product.distance if up else 0, top_k, up, kind, tile.pairs, tile.channels,
        tile.inputs, **pdl_options(x.device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_alone_up(x: Tensor, product: Product, ids: Tensor, out: Tensor, tile: Tile) -> Tensor:
    channels, inputs = product.channels, product.inputs
    *operands, kind = product.operands(x)
    alone_up_kernel[(triton.cdiv(channels, tile.channels), ids.numel())](
        *operands, ids, out, channels, inputs, product.distance, ids.shape[1], kind, tile.channels,
        min(tile.inputs, power_of_two(inputs)), **pdl_options(x.device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def launch_alone_down(
    x: Tensor, product: Product, ids: Tensor, weights: Tensor, shared: Tensor | None, out: Tensor, tile: Tile
) -> Tensor:
    channels, inputs = product.channels, product.inputs
    *operands, kind = product.operands(x)
    alone_down_kernel[(triton.cdiv(channels, tile.channels), len(ids))](
        *operands, ids, weights, out if shared is None else shared.contiguous(), out, channels, inputs, ids.shape[1],
        kind, shared is not None, tile.channels, min(tile.inputs, power_of_two(inputs)), **pdl_options(x.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def combine(results: Tensor, shared: Tensor | None, top_k: int) -> Tensor:
    """results (tokens · top_k, hidden) → (tokens, hidden)."""
    tokens, hidden = len(results) // top_k, results.shape[1]
    out = results.new_empty(tokens, hidden)
    block = min(1024, power_of_two(hidden))
    grid = (tokens, triton.cdiv(hidden, block))
    combine_kernel[grid](
        results, out if shared is None else shared.contiguous(), out, hidden, top_k, shared is not None, block,
        **pdl_options(results.device, grid[0] * grid[1] <= PDL_MAX_PROGRAMS), num_warps=4,
    )  # fmt: skip
    return out
