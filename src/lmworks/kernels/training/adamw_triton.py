"""`adamw.reference` in one pass over memory: with a split master and fp32 moments 26 bytes a weight.

A large tensor is a launch of its own, and a program takes several of its tiles: what these share (keys of random bits,
rates) is a hundred instructions, and whether there is an update at all a wait for memory. Small ones (norms, biases,
rows of a shard) share a launch: their addresses are a table, a program takes a tile of one of them. Products and sums
are not fused and roots and quotients are rounded as IEEE 754 says: memory is the limit, and the result is the
reference's to the last bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..counter_rng_triton import keys, quick_bits, third_half
from ..triton_support import multiprocessors, tl, triton
from .adamw import HALF, LAST_16, QUIET, Rule, Slot

# Measured on an H200 (benchmarks/adamw_tune.py).
TILE, WARPS = 512, 2  # 8 elements a thread: 16 bytes of a bf16 weight
SMALL = 2**16  # elements below which a tensor shares its launch
MAX_TILES_PER_PROGRAM, PROGRAMS = (
    4,
    16,
)  # tiles of a program at most, and programs that a multiprocessor has before; not timed yet

ROUND, LAST, NAN = tl.constexpr(HALF), tl.constexpr(LAST_16), tl.constexpr(QUIET)


def launch(
    slots: Sequence[Slot], corrections: Tensor, rule: Rule, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """As `adamw.adamw`."""
    numbered = list(enumerate(slots))
    for index, slot in numbered:
        if slot.weight.numel() >= SMALL:
            launch_single(slot, corrections[index], rule, grad_scale, found_inf)
    few = sorted((one for one in numbered if one[1].weight.numel() < SMALL), key=lambda one: formats(one[1]))
    for _, group in groupby(few, key=lambda one: formats(one[1])):  # almost always one
        launch_table(list(group), corrections, rule, grad_scale, found_inf)


def formats(slot: Slot) -> list[str]:
    return [str(tensor.dtype) if tensor is not None else "" for tensor in tensors(slot)]


def tensors(slot: Slot) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return slot.weight, slot.grad, slot.mean, slot.square, slot.low


def launch_single(
    slot: Slot, correction: Tensor, rule: Rule, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    numel = slot.weight.numel()
    tiles = triton.cdiv(numel, TILE)
    tiles_per_program = max(1, min(MAX_TILES_PER_PROGRAM, tiles // (PROGRAMS * multiprocessors(slot.weight.device))))
    adamw_kernel[(triton.cdiv(tiles, tiles_per_program),)](
        *tensors(slot), slot.step, slot.seed, correction, grad_scale, found_inf, numel, *rule_scalars(rule),
        MOMENTS=slot.mean is not None, MASTER=slot.low is not None, STOCHASTIC=rule.stochastic,
        TILE=TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def rule_scalars(rule: Rule) -> tuple[float, ...]:
    """As the reference has them: differences of Python floats, rounded once."""
    return rule.lr, 1 - rule.lr * rule.weight_decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps


def launch_table(
    slots: list[tuple[int, Slot]], corrections: Tensor, rule: Rule, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    """A row of the table for each: five addresses, that of its step, its seed, its size, its place in `corrections`."""
    first = slots[0][1]
    rows = [
        [*(0 if tensor is None else tensor.data_ptr() for tensor in tensors(slot)), slot.step.data_ptr(),
         slot.seed, slot.weight.numel(), index]
        for index, slot in slots
    ]  # fmt: skip
    tiles = [(row, tile) for row, (_, s) in enumerate(slots) for tile in range(triton.cdiv(s.weight.numel(), TILE))]
    table, places = (on_device(rule_scalars, corrections.device) for rule_scalars in (rows, tiles))
    table_kernel[(len(tiles),)](
        table, places, *tensors(first), first.step, corrections, grad_scale, found_inf, *rule_scalars(rule),
        MOMENTS=first.mean is not None, MASTER=first.low is not None, STOCHASTIC=rule.stochastic,
        COLUMNS=len(rows[0]), TILE=TILE, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def on_device(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Without waiting for it."""
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
def shared(step_ptr, seed, correction_ptr, scale_ptr, inf_ptr, numel):
    """Of all tiles of a tensor: the keys of its random bits, both corrections, what gradients are multiplied by, and
    how many elements are updated: none where the step is held back."""
    low, high = keys(seed, tl.load(step_ptr).to(tl.int64))
    inverse = 1.0
    if scale_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))
    if inf_ptr is not None:
        numel = tl.where(tl.load(inf_ptr) < 0.5, numel, 0)
    return low, high, tl.load(correction_ptr), tl.load(correction_ptr + 1), inverse, numel


@triton.jit
def update(
    weight_ptr, grad_ptr, mean_ptr, square_ptr, low_ptr, low_key, high_key, rate, root, inverse,
    first, numel, lr, decay, into_mean, beta2, into_square, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one tensor, from its element `first`."""
    at = first + tl.arange(0, TILE)
    inside = at < numel
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if MASTER:
        low = tl.load(low_ptr + at, mask=inside, other=0).to(tl.int32)
        wide = ((weight.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        wide = weight.to(tl.float32)
    random = quick_bits(low_key, high_key, at)
    wide = wide * decay
    if MOMENTS:
        mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
        square = tl.load(square_ptr + at, mask=inside, other=0.0)
        new_mean = mean.to(tl.float32) + (grad - mean.to(tl.float32)) * into_mean
        new_square = square.to(tl.float32) * beta2 + (grad * into_square) * grad
        wide = wide - tl.div_rn(rate * new_mean, tl.sqrt_rn(new_square) * root + eps)
        if mean.dtype == tl.bfloat16:
            new_mean = stochastic_round(new_mean, random >> 16)
            new_square = stochastic_round(new_square, third_half(random))
        tl.store(mean_ptr + at, new_mean.to(mean.dtype), mask=inside)
        tl.store(square_ptr + at, new_square.to(square.dtype), mask=inside)
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
    weight_ptr, grad_ptr, mean_ptr, square_ptr, low_ptr, step_ptr, seed, correction_ptr, scale_ptr, inf_ptr,
    numel, lr, decay, into_mean, beta2, into_square, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    low, high, rate, root, inverse, numel = shared(step_ptr, seed, correction_ptr, scale_ptr, inf_ptr, numel)
    step = tl.num_programs(0).to(tl.int64) * TILE
    for first in range(tl.program_id(0).to(tl.int64) * TILE, numel, step):
        update(
            weight_ptr, grad_ptr, mean_ptr, square_ptr, low_ptr, low, high, rate, root, inverse,
            first, numel, lr, decay, into_mean, beta2, into_square, eps, MOMENTS, MASTER, STOCHASTIC, TILE,
        )  # fmt: skip


@triton.jit
def table_kernel(
    table,  # (tensors, COLUMNS) int64
    places,  # (programs, 2) int64: row of the table, tile of the tensor
    weight_like, grad_like, mean_like, square_like, low_like, step_like,  # of the types that the addresses point to
    corrections, scale_ptr, inf_ptr, lr, decay, into_mean, beta2, into_square, eps,
    MOMENTS: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = table + tl.load(places + 2 * tl.program_id(0)) * COLUMNS
    first = tl.load(places + 2 * tl.program_id(0) + 1) * TILE
    weight_ptr = tl.load(row).to(weight_like.dtype)
    grad_ptr = tl.load(row + 1).to(grad_like.dtype)
    mean_ptr, square_ptr, low_ptr = None, None, None
    if MOMENTS:
        mean_ptr, square_ptr = tl.load(row + 2).to(mean_like.dtype), tl.load(row + 3).to(square_like.dtype)
    if MASTER:
        low_ptr = tl.load(row + 4).to(low_like.dtype)
    step_ptr = tl.load(row + 5).to(step_like.dtype)
    low, high, rate, root, inverse, numel = shared(
        step_ptr, tl.load(row + 6), corrections + 2 * tl.load(row + 8), scale_ptr, inf_ptr, tl.load(row + 7)
    )
    update(
        weight_ptr, grad_ptr, mean_ptr, square_ptr, low_ptr, low, high, rate, root, inverse,
        first, numel, lr, decay, into_mean, beta2, into_square, eps, MOMENTS, MASTER, STOCHASTIC, TILE,
    )  # fmt: skip
