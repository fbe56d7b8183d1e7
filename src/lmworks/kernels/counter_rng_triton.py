"""`counter_rng` inside Triton kernels: the same bits as in PyTorch, on every device."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from __future__ import annotations

from . import counter_rng
from .triton_support import tl, triton

GOLDEN = tl.constexpr(counter_rng.GOLDEN)
MIX64_1, MIX64_2 = (tl.constexpr(factor) for factor in counter_rng.MIX64_FACTORS)
MIX32_1, MIX32_2 = (tl.constexpr(factor) for factor in counter_rng.MIX32_FACTORS)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * MIX64_1
    x = (x ^ (x >> 27)) * MIX64_2
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * MIX32_1
    x = (x ^ (x >> 13)) * MIX32_2
    return x ^ (x >> 16)


@triton.jit
def random_bits(seed, position, ids):
    """As `counter_rng.bits`: seed and position are int64 scalars, ids (n) integers."""
    low, high = keys(seed, position)
    return mix32(mix32(ids.to(tl.uint32) ^ low) + high)


@triton.jit
def fast_random_bits(low, high, ids):
    """As `counter_rng.fast_random_bits`, with the `keys` of seed and position."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 16)) * (high | 1)
    x = (x ^ (x >> 13)) * MIX32_2
    return x ^ (x >> 16)


@triton.jit
def keys(seed, position):
    key = mix64(mix64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * GOLDEN)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def extra_random_bits(random):
    return (random * MIX32_1) >> 16
