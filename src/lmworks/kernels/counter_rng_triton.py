"""The bits of `noise` inside a kernel: equal to those that PyTorch computes, on every device."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from . import counter_rng
from .triton_support import tl, triton

GOLDEN = tl.constexpr(counter_rng.GOLDEN)
WIDE_1, WIDE_2 = (tl.constexpr(factor) for factor in counter_rng.WIDE)
NARROW_1, NARROW_2 = (tl.constexpr(factor) for factor in counter_rng.NARROW)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * WIDE_1
    x = (x ^ (x >> 27)) * WIDE_2
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * NARROW_1
    x = (x ^ (x >> 13)) * NARROW_2
    return x ^ (x >> 16)


@triton.jit
def noise_bits(seed, place, ids):
    """As `noise.bits`: seed and place are int64 scalars, ids (n) integers."""
    low, high = keys(seed, place)
    return mix32(mix32(ids.to(tl.uint32) ^ low) + high)


@triton.jit
def quick_bits(low, high, ids):
    """As `noise.quick_bits`, of the `keys` of seed and place."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 16)) * (high | 1)
    x = (x ^ (x >> 13)) * NARROW_2
    return x ^ (x >> 16)


@triton.jit
def keys(seed, place):
    key = mix64(mix64(seed.to(tl.uint64)) + (place + 1).to(tl.uint64) * GOLDEN)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def third_half(random):
    return (random * NARROW_1) >> 16
