"""Ranks that should hold the same numbers: do they, to the last bit?

Every rank hashes what its optimizer updates, and the optimizer's states with it, on its own device; the digests meet
in one exchange. Ranks are copies of each other where nothing cuts a weight between them: all of DDP, `dp_replicate`
of HSDP, the norms under tensor parallelism. What FSDP or ZeRO has cut lies on one rank alone, and cannot be compared.

    digest = Σ bits(x_i) · m_i  mod 2⁶⁴,  m_i odd

An odd factor times any power of two below 2⁶⁴ is not zero there, so one flipped bit always changes it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...parallel.data import Shard
from ...parallel.laid import Laid
from .nonfinite import everywhere

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number
CHUNK = 1 << 22  # elements at a time: the products take eight bytes each
Digests = dict[str, int]


@dataclass(frozen=True)
class Difference:
    """Copies that are not equal."""

    part: str  # of the model
    copies: list[int]  # the ranks that should agree
    odd: list[int]  # those that differ from most of the others; all of them where no side has the majority
    names: list[str]  # of the weights (or "NAME exp_avg", an optimizer's state) that differ
    digests: dict[int, int]  # by rank

    @property
    def what(self) -> str:
        ranks = ", ".join(map(str, self.odd))
        some = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        if self.odd == self.copies:
            return f"ranks {ranks} hold different copies of {some}, and none has the majority"
        word = "rank" if len(self.odd) == 1 else "ranks"
        return f"{word} {ranks} of the copies {', '.join(map(str, self.copies))} differ in {some}"


def compare(laid: Laid, optimizer: torch.optim.Optimizer) -> tuple[list[Difference], dict[int, Digests]]:
    """What differs, and the digests of every rank by the part of the model they are of. Every rank calls it."""
    mine: dict[str, Digests] = {}  # part → name → digest
    for name, part, value in held(laid, optimizer):
        mine.setdefault(part, {})[name] = value
    whole = {part: combined(digests) for part, digests in mine.items()}
    ranks = dict(enumerate(everywhere(whole, laid.mesh)))
    groups: dict[str, list[int]] = {}
    for rank, parts in ranks.items():
        for part in parts:
            groups.setdefault(part, []).append(rank)
    broken = [part for part, group in groups.items() if len({ranks[rank][part] for rank in group}) > 1]
    if not broken:
        return [], ranks
    details = everywhere({part: mine[part] for part in broken if part in mine}, laid.mesh)
    found = []
    for part in broken:
        group = groups[part]
        names = [n for n in details[group[0]][part] if len({details[rank][part][n] for rank in group}) > 1]
        digests = {rank: ranks[rank][part] for rank in group}
        found.append(Difference(part, group, odd_ones(digests), names, digests))
    return found, ranks


def odd_ones(digests: dict[int, int]) -> list[int]:
    ((common, count), *_) = Counter(digests.values()).most_common()
    return [rank for rank, digest in digests.items() if digest != common or 2 * count <= len(digests)]


def held(laid: Laid, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, int]]:
    """(name, part of the model, digest) of every weight and optimizer state here; one read from each device."""
    named: list[tuple[str, str, Tensor]] = []
    for shard in laid.shards:
        part = part_of(shard, laid)
        named.append((shard.name, part, digest(shard.leaf)))
        states = optimizer.state.get(shard.leaf, {}).items()
        named += [(f"{shard.name} {key}", part, digest(s)) for key, s in sorted(states) if isinstance(s, Tensor)]
    devices = {value.device for _, _, value in named}
    for device in devices:
        here = [one for one in named if one[2].device == device]
        for (name, part, _), value in zip(here, torch.stack([one[2] for one in here]).tolist(), strict=True):
            yield name, part, value


def part_of(shard: Shard, laid: Laid) -> str:
    """Names a place in the model: two ranks that hold a weight under the same name here hold the same numbers."""
    mesh = laid.mesh
    if mesh is None:
        return ""
    cuts = {*laid.splits.axes(shard.name), *([shard.rows] if shard.rows else [])}
    axes = sorted("shard" if axis == "flat" else axis for axis in cuts)
    return " ".join(f"{axis}={mesh.rank(axis)}" for axis in ("pp", *axes))


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        some = bits[start : start + CHUNK]
        factors = torch.arange(start, start + len(some), device=tensor.device) * GOLDEN | 1
        total += (some.to(torch.int64) * factors).sum()
    return total


def combined(digests: Digests) -> int:
    """One number for all of them, in which each has a factor of its own."""
    return sum(value * (2 * zlib.crc32(name.encode()) + 1) for name, value in digests.items()) % 2**64
