"""Scaling laws: a line through small runs, and what to do with a budget."""

from __future__ import annotations

import math

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def fit_power_law(sizes: list[float], losses: list[float], floor: float = 0.0) -> tuple[float, float]:
    """(A, α) of loss = floor + A / size^α, by least squares of the logarithms."""
    # exercise scaling_law.fit(sizes, losses, floor)
    x = [math.log(size) for size in sizes]
    y = [math.log(loss - floor) for loss in losses]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return math.exp(mean_y - slope * mean_x), -slope
    # end scaling_law.fit


def compute_optimal(flops: float, a: float, alpha: float, b: float, beta: float) -> tuple[float, float]:
    """(parameters N, tokens D) of the least loss E + a / N^α + b / D^β that 6 N D = flops allows."""
    # exercise scaling_law.optimal(flops, a, alpha, b, beta)
    parameters = (alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (flops / 6) ** (beta / (alpha + beta))
    return parameters, flops / (6 * parameters)
    # end scaling_law.optimal
