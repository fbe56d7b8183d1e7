"""Rules that end one trial by its own curve, whatever the stopper says: divergence, slope, predicted final loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .curves import predicted_end
from .stoppers import Results

RULES = ("divergence", "slope", "predicted")
RISE = 1.3  # a loss that far above the trial's own lowest one has diverged
LEAST_FALL = 0.002  # of the loss, per doubling of the steps
WINDOW = 3  # readings that a slope is taken over


def diverged(curve: Mapping[int, float]) -> bool:
    """Not finite, or far above its own lowest. A smaller rise early in a run is common, and good runs recover."""
    latest = curve[max(curve)]
    return not math.isfinite(latest) or latest > RISE * min(curve.values())


def fall_per_doubling(curve: Mapping[int, float], window: int = WINDOW) -> float | None:
    """The share of the loss that a doubling of the steps takes away: a least-squares slope over the last readings."""
    steps = sorted(curve)[-window:]
    if len(steps) < window or not all(math.isfinite(curve[step]) for step in steps):
        return None
    x = [math.log2(step) for step in steps]
    y = [curve[step] for step in steps]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return -slope / y[-1]


def reason_to_stop(rules: Sequence[str], results: Results, trial: int, last: int) -> str | None:
    """Why this trial should end now, in one phrase; None where it should go on."""
    curve = results.losses.get(trial, {})
    if not curve:
        return None
    if "divergence" in rules and diverged(curve):
        return f"diverged: loss {curve[max(curve)]:.4g} at step {max(curve):,}"
    if "slope" in rules and (fall := fall_per_doubling(curve)) is not None and fall < LEAST_FALL:
        return f"flat: the loss falls by {fall:.2%} per doubling of the steps"
    if "predicted" in rules and (best := best_end(results, last)) is not None:
        finished = [results.losses[other] for other in sorted(results.finished)]
        end = predicted_end(curve, finished, last)
        if end is not None and end.low > best:
            return f"predicted to end at {end.loss:.4g} ({end.low:.4g} to {end.high:.4g}), the best has {best:.4g}"
    return None


def best_end(results: Results, last: int) -> float | None:
    ends = [results.losses[trial][last] for trial in results.finished if last in results.losses[trial]]
    return min(ends, default=None)
