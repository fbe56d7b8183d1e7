"""`adamw.reference` in one pass over memory: with a split master and fp32 moments 26 bytes a weight.

A large tensor has a launch of its own, and a program updates several of its tiles: their shared part (keys of random
bits, rates) is a hundred instructions, and reading `found_inf` a memory latency. Small ones (norms, biases, rows of a
shard) share a multi-tensor launch: a table holds their addresses, and a program updates a tile of one of them. No fused
multiply-adds, and IEEE 754 roots and quotients: memory is the limit, and results equal the reference bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..counter_rng_triton import extra_random_bits, fast_random_bits, keys
from ..triton_support import multiprocessors, tl, triton
from .adamw import BF16_NAN, LOW_16_BITS, ROUND_HALF, AdamWConfig, ParamState

# Measured on an H200 (benchmarks/adamw_tune.py).
TILE, WARPS = 512, 2  # 8 elements per thread: 16 bytes of a bf16 weight
SMALL = 2**16  # elements below which a tensor is part of a multi-tensor launch
MAX_TILES_PER_PROGRAM = 4
PROGRAMS = 16  # of a multiprocessor, before a program updates several tiles; not timed yet

ROUND, LAST, NAN = tl.constexpr(ROUND_HALF), tl.constexpr(LOW_16_BITS), tl.constexpr(BF16_NAN)


def launch(
    states: Sequence[ParamState],
    bias_corrections: Tensor,
    config: AdamWConfig,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """As `adamw.adamw`."""
    numbered = list(enumerate(states))
    for index, state in numbered:
        if state.weight.numel() >= SMALL:
            launch_single(state, bias_corrections[index], config, grad_scale, found_inf)
    few = sorted((one for one in numbered if one[1].weight.numel() < SMALL), key=lambda one: formats(one[1]))
    for _, group in groupby(few, key=lambda one: formats(one[1])):  # almost always one
        launch_multi_tensor(list(group), bias_corrections, config, grad_scale, found_inf)


def formats(state: ParamState) -> list[str]:
    return [str(tensor.dtype) if tensor is not None else "" for tensor in tensors(state)]


def tensors(state: ParamState) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return state.weight, state.grad, state.exp_avg, state.exp_avg_sq, state.low


def launch_single(
    state: ParamState, bias_correction: Tensor, config: AdamWConfig, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    numel = state.weight.numel()
    tiles = triton.cdiv(numel, TILE)
    tiles_per_program = max(1, min(MAX_TILES_PER_PROGRAM, tiles // (PROGRAMS * multiprocessors(state.weight.device))))
    adamw_kernel[(triton.cdiv(tiles, tiles_per_program),)](
        *tensors(state), state.step, state.seed, bias_correction, grad_scale, found_inf, numel, *config_scalars(config),
        MOMENTS=state.exp_avg is not None, MASTER=state.low is not None, STOCHASTIC=config.stochastic,
        TILE=TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def config_scalars(config: AdamWConfig) -> tuple[float, ...]:
    """As in the reference: differences of Python floats, rounded once."""
    return config.lr, 1 - config.lr * config.weight_decay, 1 - config.beta1, config.beta2, 1 - config.beta2, config.eps


def launch_multi_tensor(
    states: list[tuple[int, ParamState]],
    bias_corrections: Tensor,
    config: AdamWConfig,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Rows of the table: five addresses, that of the step, seed, size, index in `bias_corrections`."""
    first = states[0][1]
    rows = [
        [*(0 if tensor is None else tensor.data_ptr() for tensor in tensors(state)), state.step.data_ptr(),
         state.seed, state.weight.numel(), index]
        for index, state in states
    ]  # fmt: skip
    tiles = [(row, tile) for row, (_, s) in enumerate(states) for tile in range(triton.cdiv(s.weight.numel(), TILE))]
    table, places = (to_device_async(numbers, bias_corrections.device) for numbers in (rows, tiles))
    multi_tensor_kernel[(len(tiles),)](
        table, places, *tensors(first), first.step, bias_corrections, grad_scale, found_inf, *config_scalars(config),
        MOMENTS=first.exp_avg is not None, MASTER=first.low is not None, STOCHASTIC=config.stochastic,
        COLUMNS=len(rows[0]), TILE=TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def to_device_async(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy asynchronously."""
    made = torch.tensor(rows, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


@triton.jit
def stochastic_round(wide, random):
    """As `adamw.narrow` with random bits."""
    bits = wide.to(tl.uint32, bitcast=True)
    rounded = ((bits + (random & LAST)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(wide) < float("inf"), rounded, wide)


@triton.jit
def high_half(wide):
    """The bits of the nearest bf16, ties away from zero: as `adamw.split`."""
    return tl.where(wide != wide, NAN, (wide.to(tl.int32, bitcast=True) + ROUND) >> 16)


@triton.jit
def load_shared(step_ptr, seed, correction_ptr, scale_ptr, inf_ptr, numel):
    """Scalars of all tiles of a tensor: keys of its random bits, both bias corrections, inverse gradient scale, and the
    number of elements to update (0 if the step is skipped)."""
    low, high = keys(seed, tl.load(step_ptr).to(tl.int64))
    inverse = 1.0
    if scale_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))
    if inf_ptr is not None:
        numel = tl.where(tl.load(inf_ptr) < 0.5, numel, 0)
    return low, high, tl.load(correction_ptr), tl.load(correction_ptr + 1), inverse, numel


@triton.jit
def update_tile(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, low_key, high_key, rate, root, inverse,
    first, numel, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Update a tile of one tensor, from element `first` on."""
    at = first + tl.arange(0, TILE)
    inside = at < numel
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if MASTER:
        low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32)
        wide = ((weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        wide = weight.to(tl.float32)
    random = fast_random_bits(low_key, high_key, at)
    wide = wide * decay
    if MOMENTS:
        exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
        new_exp_avg = exp_avg.to(tl.float32) + (grad - exp_avg.to(tl.float32)) * one_minus_beta1
        new_exp_avg_sq = exp_avg_sq.to(tl.float32) * beta2 + (grad * one_minus_beta2) * grad
        wide = wide - tl.div_rn(rate * new_exp_avg, tl.sqrt_rn(new_exp_avg_sq) * root + eps)
        if exp_avg.dtype == tl.bfloat16:
            new_exp_avg = stochastic_round(new_exp_avg, random >> 16)
            new_exp_avg_sq = stochastic_round(new_exp_avg_sq, extra_random_bits(random))
        tl.store(exp_avg_ptr + at, new_exp_avg.to(exp_avg.dtype), mask=inside)
        tl.store(exp_avg_sq_ptr + at, new_exp_avg_sq.to(exp_avg_sq.dtype), mask=inside)
    else:
        wide = wide - lr * grad
    if MASTER:
        new_low = tl.where(wide != wide, 0, wide.to(tl.int32, bitcast=True) - (high_half(wide) << 16))
        tl.store(low_ptr + at, new_low.to(tl.int16), mask=inside)
    if weight.dtype == tl.bfloat16:
        if STOCHASTIC and not MASTER:
            wide = stochastic_round(wide, random)
        tl.store(weight_ptr + at, high_half(wide).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(weight_ptr + at, wide, mask=inside)


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, step_ptr, seed, correction_ptr, scale_ptr, inf_ptr,
    numel, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    low, high, rate, root, inverse, numel = load_shared(step_ptr, seed, correction_ptr, scale_ptr, inf_ptr, numel)
    step = tl.num_programs(0).to(tl.int64) * TILE
    for first in range(tl.program_id(0).to(tl.int64) * TILE, numel, step):
        update_tile(
            weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, low, high, rate, root, inverse,
            first, numel, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps, MOMENTS, MASTER, STOCHASTIC, TILE,
        )  # fmt: skip


@triton.jit
def multi_tensor_kernel(
    table,  # (tensors, COLUMNS) int64
    places,  # (programs, 2) int64: row of the table, tile of the tensor
    weight_like, grad_like, exp_avg_like, exp_avg_sq_like, low_like, step_like,  # for the types of the addresses
    bias_corrections, scale_ptr, inf_ptr, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(places + 2 * tl.program_id(0)) * COLUMNS
    first = tl.load(places + 2 * tl.program_id(0) + 1) * TILE
    weight_ptr = tl.load(row).to(weight_like.dtype)
    grad_ptr = tl.load(row + 1).to(grad_like.dtype)
    exp_avg_ptr, exp_avg_sq_ptr, low_ptr = None, None, None
    if MOMENTS:
        exp_avg_ptr = tl.load(row + 2).to(exp_avg_like.dtype)
        exp_avg_sq_ptr = tl.load(row + 3).to(exp_avg_sq_like.dtype)
    if MASTER:
        low_ptr = tl.load(row + 4).to(low_like.dtype)
    step_ptr = tl.load(row + 5).to(step_like.dtype)
    low, high, rate, root, inverse, numel = load_shared(
        step_ptr, tl.load(row + 6), bias_corrections + 2 * tl.load(row + 8), scale_ptr, inf_ptr, tl.load(row + 7)
    )
    update_tile(
        weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, low_ptr, low, high, rate, root, inverse,
        first, numel, lr, decay, one_minus_beta1, beta2, one_minus_beta2, eps, MOMENTS, MASTER, STOCHASTIC, TILE,
    )  # fmt: skip
