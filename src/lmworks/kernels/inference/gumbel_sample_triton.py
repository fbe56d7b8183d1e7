"""`gumbel_sample.sample` on a GPU: a row of logits is split over programs, and a second kernel reduces their results.

Splits have one size whatever the batch, so a row's token and log-probability do not depend on the other rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import counter_rng
from ..counter_rng_triton import random_bits
from ..triton_support import pdl_options, pdl_wait, power_of_two, tl, triton
from .gumbel_sample import RowParams, SampleResult

SPLIT_SIZE = 4096  # columns of one program: 38 programs for a row of 151,936

SERIES_MAX = tl.constexpr(counter_rng.SERIES_MAX)
BELOW_ONE = tl.constexpr(counter_rng.BELOW_ONE)
LN_2 = tl.constexpr(math.log(2))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PARTS = ["best", "highest", "mass", "winners", "nonfinite"]  # slices of a tensor, whose alignment depends on the batch


def launch(
    logits: Tensor,
    scores: Tensor,
    rows: RowParams | None,
    logprobs: bool,
    threshold: Tensor | None = None,
    mask: Tensor | None = None,
) -> SampleResult:
    """As `gumbel_sample.reference`. Asynchronous; can be captured in a CUDA graph."""
    count, vocab = logits.shape
    splits = triton.cdiv(vocab, SPLIT_SIZE)
    same = scores.data_ptr() == logits.data_ptr() and scores.dtype == logits.dtype
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    bad = torch.empty(count, dtype=torch.bool, device=logits.device)
    found = torch.empty(count, dtype=torch.float32, device=logits.device) if logprobs else None
    floats = torch.empty(3, count, splits, dtype=torch.float32, device=logits.device)
    ints = torch.empty(2, count, splits, dtype=torch.int32, device=logits.device)
    split_kernel[(count, splits)](
        logits,
        scores,
        *(rows or (None,) * 4),
        threshold,
        mask,
        *floats,
        *ints,
        vocab,
        scores.shape[1],
        logits.stride(0),
        scores.stride(0),
        rows.temperatures.stride(0) if rows else 0,
        rows.seeds.stride(0) if rows else 0,
        mask.stride(0) if mask is not None else 0,
        SAME=same,
        NOISE=rows is not None,
        TRUNCATED=threshold is not None,
        MASKED=mask is not None,
        LOGPROBS=logprobs,
        SPLIT_SIZE=SPLIT_SIZE,
        num_warps=4,
        **pdl_options(logits.device),
    )
    reduce_kernel[(count,)](
        logits, *floats, *ints, tokens, bad, found, logits.stride(0), splits,
        SPLITS=power_of_two(splits), LOGPROBS=logprobs, num_warps=1, **pdl_options(logits.device),
    )  # fmt: skip
    return SampleResult(tokens, bad, found)


@triton.jit
def fast_log(x):
    """One instruction instead of twenty; its 22 correct bits are enough for noise."""
    if INTERPRETED:
        return tl.log(x)
    log_2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log_2 * LN_2


@triton.jit
def gumbel(seed, place, ids):
    """As `counter_rng.gumbel(counter_rng.bits(…))`: seed and position are int64 scalars, ids (n) int32."""
    random = random_bits(seed, place, ids)
    v = tl.minimum((random.to(tl.float32) + 0.5) * 2.3283064365386963e-10, BELOW_ONE)  # 2⁻³²
    series = (((v * 0.25 + 1 / 3) * v + 0.5) * v + 1) * v
    return -fast_log(tl.where(v < SERIES_MAX, series, -fast_log(1 - v)))


@triton.jit(do_not_specialize_on_alignment=PARTS)
def split_kernel(
    logits,  # (rows, vocab)
    scores,  # (rows, valid)
    temperatures,  # (slots) fp32
    seeds,  # (slots) int64
    slots,  # (rows) int64
    output_positions,  # (rows) int64
    thresholds,  # (rows) fp32
    masks,  # (rows, ⌈valid/32⌉) int32
    best,  # (rows, splits) fp32: the best score of a split
    highest,  # (rows, splits) fp32: its highest logit
    mass,  # (rows, splits) fp32: Σ exp(logit − highest)
    winners,  # (rows, splits) int32: the token of the best score
    nonfinite,  # (rows, splits) int32: whether a logit is not finite
    vocab,
    valid,
    logits_stride,
    scores_stride,
    temperatures_stride,
    seeds_stride,
    masks_stride,
    SAME: tl.constexpr,
    NOISE: tl.constexpr,
    TRUNCATED: tl.constexpr,
    MASKED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT_SIZE + tl.arange(0, SPLIT_SIZE)
    inside = ids < vocab
    x = tl.load(logits + row * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
    at = row * tl.num_programs(1) + split
    tl.store(nonfinite + at, tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, axis=0))
    if LOGPROBS:
        top = tl.max(tl.where(inside, x, -float("inf")), axis=0)
        tl.store(highest + at, top)
        tl.store(mass + at, tl.sum(tl.where(inside, tl.exp(x - top), 0.0), axis=0))
    if SAME:
        score = x
    else:
        score = tl.load(scores + row * scores_stride + ids, mask=ids < valid, other=0.0).to(tl.float32)
    allowed = ids < valid
    if TRUNCATED:
        allowed &= score >= tl.load(thresholds + row)
    if MASKED:
        words = tl.load(masks + row * masks_stride + ids // 32, mask=ids < valid, other=0)
        allowed &= ((words >> (ids % 32)) & 1) > 0
    if NOISE:
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot * temperatures_stride)
        if temperature > 0:
            score += temperature * gumbel(tl.load(seeds + slot * seeds_stride), tl.load(output_positions + row), ids)
    score = tl.where(allowed, score, -float("inf"))
    peak = tl.max(score, axis=0)
    tl.store(best + at, peak)
    tl.store(winners + at, tl.min(tl.where(score == peak, ids, 2147483647), axis=0))


@triton.jit(do_not_specialize_on_alignment=PARTS)
def reduce_kernel(
    logits,
    best,
    highest,
    mass,
    winners,
    nonfinite,
    tokens,
    bad,
    found,
    logits_stride,
    splits,
    SPLITS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    at = row * splits + split
    scores = tl.load(best + at, mask=inside, other=-float("inf"))
    peak = tl.max(scores, axis=0)
    ids = tl.load(winners + at, mask=inside, other=2147483647)
    winner = tl.min(tl.where(scores == peak, ids, 2147483647), axis=0)
    failed = (tl.max(tl.load(nonfinite + at, mask=inside, other=0), axis=0) > 0) | (peak == -float("inf"))
    token = tl.where(failed, 0, winner).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(bad + row, failed)
    if LOGPROBS:
        tops = tl.load(highest + at, mask=inside, other=-float("inf"))
        top = tl.max(tops, axis=0)
        total = tl.sum(tl.load(mass + at, mask=inside, other=0.0) * tl.exp(tops - top), axis=0)
        chosen = tl.load(logits + row * logits_stride + token).to(tl.float32)
        tl.store(found + row, chosen - top - tl.log(total))
