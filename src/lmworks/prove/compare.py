"""Errors of a layout against one rank: every element of every tensor, on every rank that holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .rank_record import IndexedShard, RankRecord

FullTensors = dict[str, Tensor]  # by name, flattened


@dataclass(frozen=True)
class Worst:
    """The largest error, and the name of its tensor."""

    value: float = 0.0
    name: str = ""


def full_tensors(shards: list[IndexedShard], values: list[Tensor]) -> FullTensors:
    """The tensors of one rank that holds all of them."""
    return {shard.name: value.flatten().double() for shard, value in zip(shards, values, strict=True)}


def abs_errors(reference: FullTensors, ranks: Iterable[tuple[list[IndexedShard], list[Tensor]]]) -> FullTensors:
    """|value − reference| of every element: the largest over replicas, ∞ for an element that no rank holds."""
    found = {name: torch.full_like(value, -1) for name, value in reference.items()}
    for shards, values in ranks:
        for shard, value in zip(shards, values, strict=True):
            off = (value.flatten().double() - reference[shard.name][shard.index]).abs()
            before = found[shard.name]
            before[shard.index] = torch.maximum(before[shard.index], off)
    return {name: torch.where(off < 0, torch.inf, off) for name, off in found.items()}


def relative_errors(reference: FullTensors, off: FullTensors, zero: tuple[str, ...] = ()) -> dict[str, float]:
    """‖Δ‖ / ‖reference‖ of each; those in `zero`, which are 0 but for rounding, are divided by the norm of all."""
    everything = norm(reference.values())
    sizes = {n: everything if zero and n.endswith(zero) else float(value.norm()) for n, value in reference.items()}
    return {name: float(value.norm()) / max(sizes[name], 1e-30) for name, value in off.items()}


def norm(values: Iterable[Tensor]) -> float:
    return float(torch.stack([value.norm() for value in values]).norm())


def worst(ratios: dict[str, float]) -> Worst:
    name = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else float("inf"))  # NaN is worst
    return Worst(ratios[name], name)


def gradient_errors(reference: RankRecord, ranks: list[RankRecord], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """√(Σ‖Δ‖² / Σ‖g‖²) over the steps, by weight: in a small tensor a single batch may be far off by chance."""
    off: dict[str, list[Tensor]] = {}
    size: dict[str, list[Tensor]] = {}
    for step, gradients in enumerate(reference.gradients):
        one = full_tensors(reference.shards, gradients)
        errors = abs_errors(one, ((rank.shards, rank.gradients[step]) for rank in ranks))
        for name in one:
            size.setdefault(name, []).append(one[name])
            off.setdefault(name, []).append(errors[name])
    return relative_errors(concatenated(size), concatenated(off), zero)


def concatenated(table: dict[str, list[Tensor]]) -> FullTensors:
    return {name: torch.cat(parts) for name, parts in table.items()}


def weight_errors(reference: RankRecord, ranks: list[RankRecord], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """Relative errors of weights after the last step, and of buffers."""
    one = full_tensors(reference.shards, reference.weights)
    one |= {name: value.flatten().double() for name, value in reference.buffers.items()}
    of_ranks = []
    for rank in ranks:
        buffers = [(IndexedShard(n, torch.arange(value.numel())), value) for n, value in rank.buffers.items()]
        of_ranks.append(
            ([*rank.shards, *(shard for shard, _ in buffers)], [*rank.weights, *(value for _, value in buffers)])
        )
    return relative_errors(one, abs_errors(one, of_ranks), zero)


def scalar_errors(reference: list[float], ranks: list[list[float]]) -> float:
    """The largest |Δ| / |reference| of any step on any rank."""
    pairs = ((one, other) for values in ranks for one, other in zip(reference, values, strict=True))
    errors = [abs(one - other) / max(abs(one), 1e-30) for one, other in pairs]
    return float("nan") if any(value != value for value in errors) else max(errors)


def rms_error(reference: list[float], values: list[float]) -> float:
    squares = [((one - other) / one) ** 2 for one, other in zip(reference, values, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
