"""Counter-based random numbers: a hash of (seed, position, token id).

A stateful generator makes what one sequence draws depend on the others in its batch. Here the number of a token at a
position is the same alone and in any batch, with the same bits on a CPU and on a GPU: integer arithmetic modulo 2³² and
2⁶⁴ only. Seed and position give 64 bits through the finaliser of splitmix64 (Steele et al. 2014), and each id is mixed
into both halves with that of MurmurHash3 (Appleby 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: the step between positions of one seed
MIX64_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX32_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
SERIES_MAX = 2.0**-6  # below it −log(1 − v) is a series, which keeps all digits of v
BELOW_ONE = 1 - 2.0**-24  # largest float below 1


def signed(number: int, bits: int) -> int:
    """The same bits as a signed integer: torch multiplies no unsigned ones on every device."""
    return number - (number >> (bits - 1) << bits)


def logical_shift_right(x: Tensor, by: int) -> Tensor:
    """torch's own shift is arithmetic."""
    return (x >> by) & ((1 << (8 * x.itemsize - by)) - 1)


def mix64(x: Tensor) -> Tensor:
    for by, factor in zip((30, 27), MIX64_FACTORS, strict=True):
        x = (x ^ logical_shift_right(x, by)) * signed(factor, 64)
    return x ^ logical_shift_right(x, 31)


def mix32(x: Tensor) -> Tensor:
    """In place: most of the work over a vocabulary."""
    for by, factor in zip((16, 13), MIX32_FACTORS, strict=True):
        x.bitwise_xor_(logical_shift_right(x, by)).mul_(signed(factor, 32))
    return x.bitwise_xor_(logical_shift_right(x, 16))


def bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """32 random bits as int32 (rows, ids), for seeds and places (rows) int64 and ids (ids)."""
    low, high = keys(seeds, positions)
    return mix32(mix32(ids.to(torch.int32) ^ low).add_(high))


def fast_random_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """As `bits`, with half the work: mixed once, with a factor from the key. For rounding, not for sampling: with some
    weak keys distant numbers are correlated; the next step has another key."""
    low, high = keys(seeds, positions)
    x = ids.to(torch.int32) ^ low
    x = x.bitwise_xor_(logical_shift_right(x, 16)) * (high | 1)
    x = x.bitwise_xor_(logical_shift_right(x, 13)).mul_(signed(MIX32_FACTORS[1], 32))
    return x.bitwise_xor_(logical_shift_right(x, 16))


def keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The key of each row as two halves of 32 bits, (rows, 1) each."""
    key = mix64(mix64(seeds) + (positions + 1) * signed(GOLDEN, 64)).unsqueeze(1)
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def extra_random_bits(random: Tensor) -> Tensor:
    """16 more bits, derived from 32 random ones."""
    return logical_shift_right(random * signed(MIX32_FACTORS[0], 32), 16)


def uniform(random: Tensor) -> Tensor:
    """Bits to floats inside (0, 1), small ones at full precision."""
    return ((random.to(torch.int64) & 0xFFFFFFFF).float() + 0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE)


def gumbel(random: Tensor) -> Tensor:
    """Bits to Gumbel noise, −log(−log(1 − v)): argmax(logits + noise) is a draw from softmax(logits).

    Large noise comes from small v, of which floats have many: equal noise for two tokens near the top is as rare
    as 32 bits allow, even in a flat distribution over a large vocabulary.
    """
    v = uniform(random)
    series = (((v * 0.25 + 1 / 3) * v + 0.5) * v + 1) * v
    return torch.where(v < SERIES_MAX, series, -torch.log(1 - v)).log_().neg_()
