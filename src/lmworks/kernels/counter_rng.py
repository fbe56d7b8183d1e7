"""Random numbers that are a function of where they are used: a hash of (seed, place, token id).

A generator has a state that every draw moves on, so that what one sequence draws depends on the others in its
batch. Here the number of a token at a place is the same alone and in any batch, and its bits are the same on a CPU
and on a GPU: integer arithmetic modulo 2³² and 2⁶⁴ only. Seed and place give 64 bits through the finaliser of
splitmix64 (Steele et al. 2014), each id is mixed into both halves with that of MurmurHash3 (Appleby 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: the step between the places of one seed
WIDE = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
NARROW = (0x85EBCA6B, 0xC2B2AE35)
SMALL = 2.0**-6  # below it −log(1 − v) is summed as a series, which keeps all digits of v
LAST = 1 - 2.0**-24  # largest float below 1


def signed(number: int, bits: int) -> int:
    """The same bits as a signed integer, which is all that torch multiplies on every device."""
    return number - (number >> (bits - 1) << bits)


def shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own drags the sign along."""
    return (x >> by) & ((1 << (8 * x.itemsize - by)) - 1)


def mix64(x: Tensor) -> Tensor:
    for by, factor in zip((30, 27), WIDE, strict=True):
        x = (x ^ shifted(x, by)) * signed(factor, 64)
    return x ^ shifted(x, 31)


def mix32(x: Tensor) -> Tensor:
    """In place: over a vocabulary this is most of the work."""
    for by, factor in zip((16, 13), NARROW, strict=True):
        x.bitwise_xor_(shifted(x, by)).mul_(signed(factor, 32))
    return x.bitwise_xor_(shifted(x, 16))


def bits(seeds: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """32 random bits as int32 (rows, ids), for seeds and places (rows) int64 and ids (ids)."""
    low, high = keys(seeds, places)
    return mix32(mix32(ids.to(torch.int32) ^ low).add_(high))


def quick_bits(seeds: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """As `bits`, with half the work: mixed once, by a factor out of the key. For rounding, not for drawing: some keys
    are weak, and a number may then be related to one far from it; the next step has another key."""
    low, high = keys(seeds, places)
    x = ids.to(torch.int32) ^ low
    x = x.bitwise_xor_(shifted(x, 16)) * (high | 1)
    x = x.bitwise_xor_(shifted(x, 13)).mul_(signed(NARROW[1], 32))
    return x.bitwise_xor_(shifted(x, 16))


def keys(seeds: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of 32 bits, (rows, 1) each."""
    key = mix64(mix64(seeds) + (places + 1) * signed(GOLDEN, 64)).unsqueeze(1)
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def third_half(random: Tensor) -> Tensor:
    """16 more bits of 32 random ones."""
    return shifted(random * signed(NARROW[0], 32), 16)


def uniform(random: Tensor) -> Tensor:
    """Bits to floats inside (0, 1), the small ones with all their digits."""
    return ((random.to(torch.int64) & 0xFFFFFFFF).float() + 0.5).mul_(2.0**-32).clamp_(max=LAST)


def gumbel(random: Tensor) -> Tensor:
    """Bits to Gumbel noise, −log(−log(1 − v)): argmax(logits + noise) is a draw from softmax(logits).

    Large noise comes from small v, of which floats have many: equal noise for two tokens near the top is as rare
    as 32 bits allow, even in a flat distribution over a large vocabulary.
    """
    v = uniform(random)
    series = (((v * 0.25 + 1 / 3) * v + 0.5) * v + 1) * v
    return torch.where(v < SMALL, series, -torch.log(1 - v)).log_().neg_()
