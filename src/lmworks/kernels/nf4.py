"""NF4, the 4-bit format of QLoRA (Dettmers et al. 2023), in plain torch.

A weight is cut into blocks of 64 numbers. A number is one of 16 levels, quantiles of a normal distribution, times the
largest magnitude of its block. These magnitudes are quantized again ("double quantization"): less their mean, in
groups of 256, each one of 256 levels times the largest of its group. 4.127 bits a number in all.

    w ≈ LEVELS[code] · (DYNAMIC_LEVELS[scale] · group_scale + offset)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec.lora import NF4_BLOCK, NF4_GROUP

# Appendix E of the paper: quantiles of N(0, 1), with an exact zero, scaled to [−1, 1].
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LEAST = torch.finfo(torch.float32).tiny


@functools.cache
def dynamic_levels() -> Tensor:
    """Signed 8-bit levels with 1 to 7 bits of exponent (dynamic tree quantization, Dettmers 2016)."""
    found = [0.0, 1.0]
    for bits in range(7):
        edges = torch.linspace(0.1, 1, 2**bits + 1)
        means = 10.0 ** (bits - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(found))


@dataclass(frozen=True)
class NF4:
    """Quantized numbers, (pieces, n), each piece on its own; its last block is filled up with zeros."""

    codes: Tensor  # (pieces, blocks · 32) uint8: two numbers each, the first in the high bits
    scales: Tensor  # (pieces, blocks) uint8
    group_scales: Tensor  # (pieces, ⌈blocks / 256⌉) fp32
    offset: Tensor  # (pieces, 1) fp32: the mean of the blocks' magnitudes


def quantize(pieces: Tensor) -> NF4:
    """(pieces, n)"""
    blocks = padded(pieces.detach().float(), NF4_BLOCK).unflatten(1, (-1, NF4_BLOCK))
    largest = blocks.abs().amax(dim=2)
    levels = torch.tensor(LEVELS, device=pieces.device)
    codes = nearest(blocks / largest.clamp(min=LEAST).unsqueeze(2), levels).flatten(1).unflatten(1, (-1, 2))
    offset = largest.mean(dim=1, keepdim=True)
    groups = padded(largest - offset, NF4_GROUP).unflatten(1, (-1, NF4_GROUP))
    group_scales = groups.abs().amax(dim=2)
    steps = groups / group_scales.clamp(min=LEAST).unsqueeze(2)
    scales = nearest(steps, dynamic_levels().to(pieces.device)).flatten(1)[:, : largest.shape[1]]
    packed = codes[..., 0] << 4 | codes[..., 1]
    return NF4(packed.to(torch.uint8), scales.to(torch.uint8), group_scales, offset)


def dequantize(stored: NF4, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(pieces, size)"""
    device, blocks = stored.codes.device, stored.scales.shape[1]
    group = stored.group_scales.repeat_interleave(NF4_GROUP, dim=1)[:, :blocks]
    largest = dynamic_levels().to(device)[stored.scales.int()] * group + stored.offset
    pairs = torch.stack((stored.codes >> 4, stored.codes & 15), dim=-1)
    levels = torch.tensor(LEVELS, device=device)[pairs.flatten(1).unflatten(1, (-1, NF4_BLOCK)).int()]
    return (levels * largest.unsqueeze(2)).flatten(1)[:, :size].to(dtype)


def padded(values: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[1] % multiple))


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The index of the nearest of sorted levels."""
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2)
