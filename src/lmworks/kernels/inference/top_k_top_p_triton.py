"""`top_k_top_p.score_thresholds` on a GPU: a search for the bits of the threshold instead of a sort.

Floats are ordered like integers once the bits of negative ones are inverted. The threshold of top-k is the smallest
integer u with fewer than k scores above it, that of top-p the smallest with less than top_p of the probability above
it. Both are found two bits at a time, each with one pass over the row for three candidates: 16 passes, or 8 over bf16
logits, which have 16 bits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..triton_support import pdl_options, pdl_wait, power_of_two, tl, triton
from .top_k_top_p import TruncationParams

TILE = 4096
LOG2_E = tl.constexpr(math.log2(math.e))
LOW_BITS = {torch.bfloat16: 16, torch.float16: 12, torch.float32: 0}  # bits of fp32 that are 0 in each dtype


def launch(scores: Tensor, params: TruncationParams) -> Tensor:
    """As `top_k_top_p.reference`. A row's result does not depend on other rows."""
    rows, valid = scores.shape
    threshold = torch.empty(rows, dtype=torch.float32, device=scores.device)
    truncation_kernel[(rows,)](
        scores,
        *params,
        threshold,
        valid,
        scores.stride(0),
        *(table.stride(0) for table in params[:4]),
        TILE=min(TILE, power_of_two(valid)),
        LOW=LOW_BITS[scores.dtype],
        num_warps=8,
        **pdl_options(scores.device),
    )
    return threshold


@triton.jit
def sortable_bits(x):
    """Floats as unsigned integers in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) > 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def as_float(key, LOW: tl.constexpr):
    """The inverse of `sortable_bits`, for a key without its low bits, which are 0 in the float."""
    key = key << LOW
    bits = tl.where((key >> 31) > 0, key ^ 0x80000000, (key ^ 0xFFFFFFFF) >> LOW << LOW)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def summands(x, inside, best, scale, MASS: tl.constexpr):
    """Probabilities relative to the best token, or ones to count. scale = log₂(e) / temperature."""
    if MASS:
        each = tl.exp2((x - best) * scale)
    else:
        each = tl.full(x.shape, 1.0, tl.float32)
    return tl.where(inside, each, 0.0)


@triton.jit
def search_threshold(row, valid, target, best, scale, MASS: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr):
    """The smallest score with less than `target` above it."""
    BITS: tl.constexpr = 32 - LOW
    found = tl.full((), 0, tl.uint32)  # the bits of its key that are known
    step = tl.full((), 1 << (BITS - 2), tl.uint32)
    for _ in range(BITS // 2):
        first, second, third = found + (step - 1), found + (2 * step - 1), found + (3 * step - 1)
        above_1 = tl.zeros((TILE,), tl.float32)
        above_2 = tl.zeros((TILE,), tl.float32)
        above_3 = tl.zeros((TILE,), tl.float32)
        for start in range(0, valid, TILE):
            ids = start + tl.arange(0, TILE)
            inside = ids < valid
            x = tl.load(row + ids, mask=inside, other=0.0).to(tl.float32)
            each = summands(x, inside, best, scale, MASS)
            key = sortable_bits(x) >> LOW
            above_1 += tl.where(key > first, each, 0.0)
            above_2 += tl.where(key > second, each, 0.0)
            above_3 += tl.where(key > third, each, 0.0)
        found += step * (tl.sum(above_1, axis=0) >= target).to(tl.uint32)
        found += step * (tl.sum(above_2, axis=0) >= target).to(tl.uint32)
        found += step * (tl.sum(above_3, axis=0) >= target).to(tl.uint32)
        step = step >> 2
    return as_float(found, LOW)


@triton.jit
def truncation_kernel(
    scores,  # (rows, valid)
    temperatures,  # (slots)
    top_ks,
    top_ps,
    min_ps,
    slots,  # (rows) int64
    thresholds,  # (rows)
    valid,
    scores_stride,
    temperatures_stride,
    top_ks_stride,
    top_ps_stride,
    min_ps_stride,
    TILE: tl.constexpr,
    LOW: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    at = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + at)
    temperature = tl.load(temperatures + slot * temperatures_stride)
    top_k = tl.load(top_ks + slot * top_ks_stride)
    top_p = tl.load(top_ps + slot * top_ps_stride)
    min_p = tl.load(min_ps + slot * min_ps_stride)
    row = scores + at * scores_stride
    threshold = tl.full((), -float("inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        highest = tl.full((TILE,), -float("inf"), tl.float32)
        for start in range(0, valid, TILE):
            ids = start + tl.arange(0, TILE)
            highest = tl.maximum(highest, tl.load(row + ids, mask=ids < valid, other=-float("inf")).to(tl.float32))
        best = tl.max(highest, axis=0)
        scale = LOG2_E / temperature
        if (top_k > 0) & (top_k < valid):
            threshold = search_threshold(row, valid, top_k, best, scale, False, TILE, LOW)
        if top_p < 1:
            masses = tl.zeros((TILE,), tl.float32)
            for start in range(0, valid, TILE):
                ids = start + tl.arange(0, TILE)
                x = tl.load(row + ids, mask=ids < valid, other=0.0).to(tl.float32)
                masses += summands(x, (ids < valid) & (x >= threshold), best, scale, True)
            target = top_p * tl.sum(masses, axis=0)
            threshold = tl.maximum(threshold, search_threshold(row, valid, target, best, scale, True, TILE, LOW))
        if min_p > 0:
            threshold = tl.maximum(threshold, best + tl.log(min_p) * temperature)
    tl.store(thresholds + at, threshold)
