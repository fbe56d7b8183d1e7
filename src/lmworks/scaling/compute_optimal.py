"""Which shape, how many tokens: the least loss of a budget, or at that loss the least cost of training and serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..spec.errors import SpecError
from .fitting import FittedLaw
from .huber import Array
from .optimum import golden
from .shapes import Shape

SAME_LOSS = 2e-4  # of log-loss: shapes whose losses differ by less are judged by their proportions
USUAL_ASPECT = 112.0  # Llama 3's have 102 to 130
MOST_TOKENS = 1e16


@dataclass(frozen=True)
class Allocation:
    shape: Shape
    tokens: float
    log_loss: float

    @property
    def flops(self) -> float:
        return self.shape.flops_per_token * self.tokens

    @property
    def tokens_per_param(self) -> float:
        return self.tokens / self.shape.n


def least_loss(fitted: FittedLaw, shapes: Sequence[Shape], flops: float) -> Allocation:
    """By exact counts: every shape gets the tokens that the budget leaves it."""
    tokens = np.array([flops / shape.flops_per_token for shape in shapes])
    losses = law_at(fitted, shapes, tokens)
    best = int(np.argmin(losses))
    if best in (0, len(shapes) - 1):
        edge = "smallest" if best == 0 else "largest"
        shape = shapes[best]
        raise SpecError(
            f"{flops:.3g} FLOP: the best of the shapes is the {edge}, {shape.n:.3g} parameters with a vocabulary of "
            f"{shape.model.vocab}; another --vocab, or a budget from 1e15 to 1e28 FLOP, has one in between"
        )
    close = [index for index, loss in enumerate(losses) if loss <= losses[best] + SAME_LOSS]
    index = min(close, key=lambda one: abs(np.log(shapes[one].aspect / USUAL_ASPECT)))
    return Allocation(shapes[index], float(tokens[index]), float(losses[index]))


def law_at(fitted: FittedLaw, shapes: Sequence[Shape], tokens: Array) -> Array:
    n = np.array([float(shape.size(fitted.convention)) for shape in shapes])
    seq = np.array([float(shape.seq) for shape in shapes])
    return fitted.law.log_loss(fitted.theta, {"n": n, "d": tokens, "seq": seq})


def tokens_for_loss(fitted: FittedLaw, shape: Shape, log_loss: float) -> float | None:
    """Tokens after which a shape reaches a loss; None where it never does."""

    def off(log_tokens: Array) -> Array:
        return np.abs(law_at(fitted, [shape], np.exp(log_tokens)) - log_loss)

    if law_at(fitted, [shape], np.array([MOST_TOKENS]))[0] > log_loss:
        return None
    return float(np.exp(golden(off, np.array([0.0]), np.array([np.log(MOST_TOKENS)]))[0]))


def least_total_cost(
    fitted: FittedLaw,
    shapes: Sequence[Shape],
    best: Allocation,
    train_cost: Callable[[Shape, float], float],
    serve_cost: Callable[[Shape], float],
) -> tuple[Allocation, list[tuple[Allocation, float, float]]]:
    """Of the shapes up to the compute-optimal one, trained until they are as good (Sardana et al. 2024).

    `train_cost` of a shape and its tokens, `serve_cost` of a shape. Also returned: what was compared, with both costs.
    """
    compared = []
    for shape in thinned([shape for shape in shapes if shape.n < best.shape.n], best.shape.n):
        tokens = tokens_for_loss(fitted, shape, best.log_loss)
        if tokens is not None:
            compared.append((Allocation(shape, tokens, best.log_loss), train_cost(shape, tokens), serve_cost(shape)))
    compared.append((best, train_cost(best.shape, best.tokens), serve_cost(best.shape)))
    return min(compared, key=lambda one: one[1] + one[2])[0], compared


def thinned(shapes: Sequence[Shape], largest: float, step: float = 1.06) -> list[Shape]:
    """One of every 6 %, of the usual proportions; from a hundredth of the largest on."""
    groups: dict[int, Shape] = {}
    for shape in shapes:
        if shape.n < largest / 100:
            continue
        group = int(np.log(largest / shape.n) / np.log(step))
        kept = groups.get(group)
        if kept is None or abs(np.log(shape.aspect / USUAL_ASPECT)) < abs(np.log(kept.aspect / USUAL_ASPECT)):
            groups[group] = shape
    return list(groups.values())
