"""How far a layout's ranks are from the whole that one rank computed, every element on every rank that holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .trial import Piece, Trial

Whole = dict[str, Tensor]  # by name, flattened


@dataclass(frozen=True)
class Worst:
    """The largest difference, and whose it is."""

    value: float = 0.0
    name: str = ""


def whole(pieces: list[Piece], values: list[Tensor]) -> Whole:
    """Of one rank that holds everything."""
    return {piece.name: value.flatten().double() for piece, value in zip(pieces, values, strict=True)}


def distances(truth: Whole, ranks: Iterable[tuple[list[Piece], list[Tensor]]]) -> Whole:
    """|value − truth| of every element; of several copies the one that is furthest off, and ∞ where nobody has one."""
    found = {name: torch.full_like(value, -1) for name, value in truth.items()}
    for pieces, values in ranks:
        for piece, value in zip(pieces, values, strict=True):
            off = (value.flatten().double() - truth[piece.name][piece.index]).abs()
            before = found[piece.name]
            before[piece.index] = torch.maximum(before[piece.index], off)
    return {name: torch.where(off < 0, torch.inf, off) for name, off in found.items()}


def relative(truth: Whole, off: Whole, zero: tuple[str, ...] = ()) -> dict[str, float]:
    """‖Δ‖ / ‖truth‖ of each; where the truth is `zero` but for rounding, the norm of all stands for it."""
    everything = norm(truth.values())
    sizes = {n: everything if zero and n.endswith(zero) else float(value.norm()) for n, value in truth.items()}
    return {name: float(value.norm()) / max(sizes[name], 1e-30) for name, value in off.items()}


def norm(values: Iterable[Tensor]) -> float:
    return float(torch.stack([value.norm() for value in values]).norm())


def worst(ratios: dict[str, float]) -> Worst:
    name = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else float("inf"))  # NaN is worst
    return Worst(ratios[name], name)


def gradient_errors(truth: Trial, ranks: list[Trial], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """Of every weight, √(Σ‖Δ‖² / Σ‖g‖²) over the steps: of few numbers, one batch alone may be far off by chance."""
    off: dict[str, list[Tensor]] = {}
    size: dict[str, list[Tensor]] = {}
    for step, gradients in enumerate(truth.gradients):
        one = whole(truth.pieces, gradients)
        apart = distances(one, ((rank.pieces, rank.gradients[step]) for rank in ranks))
        for name in one:
            size.setdefault(name, []).append(one[name])
            off.setdefault(name, []).append(apart[name])
    return relative(joined(size), joined(off), zero)


def joined(table: dict[str, list[Tensor]]) -> Whole:
    return {name: torch.cat(parts) for name, parts in table.items()}


def weight_errors(truth: Trial, ranks: list[Trial], zero: tuple[str, ...] = ()) -> dict[str, float]:
    """Of every weight after the last step, and of every buffer."""
    one = whole(truth.pieces, truth.weights) | {n: value.flatten().double() for n, value in truth.buffers.items()}
    held = []
    for rank in ranks:
        buffers = [(Piece(n, torch.arange(value.numel())), value) for n, value in rank.buffers.items()]
        held.append(
            ([*rank.pieces, *(piece for piece, _ in buffers)], [*rank.weights, *(value for _, value in buffers)])
        )
    return relative(one, distances(one, held), zero)


def scalar_errors(truth: list[float], ranks: list[list[float]]) -> float:
    """The largest |Δ| / |truth| of any step on any rank."""
    pairs = ((one, other) for values in ranks for one, other in zip(truth, values, strict=True))
    apart = [abs(one - other) / max(abs(one), 1e-30) for one, other in pairs]
    return float("nan") if any(value != value for value in apart) else max(apart)


def rms_error(truth: list[float], values: list[float]) -> float:
    return math.sqrt(sum(((one - other) / one) ** 2 for one, other in zip(truth, values, strict=True)) / len(truth))
