"""The verdict on a precision, from the metrics of its run. The thresholds are also in the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .variants import BASE, SEED, Variant

Steps = Sequence[dict[str, Any]]

LOST_UPDATES = 0.05  # share of the update rounded away, from which it is reported
FLUSHED = 0.01  # share of gradient elements flushed to zero, from which it is reported
THRESHOLDS = (
    "The gap is the mean over the evaluations of the run's second half of the loss on held-out data less fp32's; the "
    "noise is the root mean square of the same difference between two seeds of fp32. A gap of at most the noise is "
    "'as fp32 within the noise'. Lost updates are told from "
    f"{LOST_UPDATES:.0%} of the update on, gradients flushed to zero from {FLUSHED:.0%} of their elements on, both at "
    "the worst of the steps looked at; overflows are all told."
)


@dataclass(frozen=True)
class RunMetrics:
    """None: not measured, or the run ended before."""

    loss: float | None  # of training, the mean over the last tenth of the steps
    loss_gap: float | None  # to fp32's, over the same steps and batches
    val_loss: float | None  # at the last evaluation
    gap: float | None  # of the loss on held-out data, see THRESHOLDS
    norm: float | None  # of the gradient, the median
    norm_ratio: float | None  # to fp32's, the median over steps
    flushed: float | None  # share of gradient elements that are 0 and in fp32 are not, worst inspected step
    nonfinite: float | None  # share that is infinite or NaN, worst inspected step
    gradient_error: float | None  # ‖g − g of fp32‖ / ‖g of fp32‖, the median over inspected steps
    unmoved: float | None  # share of weights that should have moved and did not, worst inspected step
    kept: float | None  # of the update, worst inspected step


def run_metrics(steps: Steps, looked: Steps, base: Steps, error: str) -> RunMetrics:
    gradients = [totals(line["gradients"]) for line in looked if line.get("gradients")]
    updates = [line["update"] for line in looked if line.get("update")]
    losses, theirs = by_step(steps, "loss"), by_step(base, "loss")
    last = sorted(losses)[-max(1, len(base) // 10) :] if losses and not error else []
    norms, their_norms = by_step(steps, "grad_norm"), by_step(base, "grad_norm")
    ratios = [norm / their_norms[step] for step, norm in norms.items() if their_norms.get(step)]
    evaluated = by_step(steps, "val_loss")
    return RunMetrics(
        loss=mean([losses[step] for step in last]),
        loss_gap=mean([losses[step] - theirs[step] for step in last if step in theirs]),
        val_loss=evaluated[max(evaluated)] if evaluated else None,
        gap=mean(differences(steps, base)),
        norm=median(norms.values()) if norms else None,
        norm_ratio=median(ratios) if ratios else None,
        flushed=max((one[1] / one[0] for one in gradients), default=None),
        nonfinite=max((one[2] / one[0] for one in gradients), default=None),
        gradient_error=median(math.sqrt(one[3] / one[4]) for one in gradients) if gradients else None,
        unmoved=max((one["unmoved"] for one in updates), default=None),
        kept=min((one["kept"] for one in updates), default=None),
    )


def seed_noise(base: Steps, seed: Steps) -> float | None:
    off = differences(seed, base)
    return math.sqrt(sum(one * one for one in off) / len(off)) if off else None


def differences(steps: Steps, base: Steps) -> list[float]:
    """Differences of validation losses, at the evaluations of the second half that both runs reached."""
    own, theirs = by_step(steps, "val_loss"), by_step(base, "val_loss")
    half = max(theirs, default=0) / 2
    return [own[step] - theirs[step] for step in sorted(own.keys() & theirs.keys()) if step > half]


def by_step(steps: Steps, key: str) -> dict[int, float]:
    return {step["step"]: step[key] for step in steps if step.get(key) is not None}


def totals(parts: dict[str, list[float]]) -> list[float]:
    return [sum(column) for column in zip(*parts.values(), strict=True)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# --- text -----------------------------------------------------------------------------------------------


def verdict(variant: Variant, found: RunMetrics, noise: float | None, error: str, overflows: Sequence[int]) -> str:
    if error:
        return f"failed: {error}"
    if variant == BASE:
        return "the baseline"
    if variant == SEED:
        return "the noise" if noise is None else f"the noise: {noise:.4f}"
    return "; ".join([by_loss(found.gap, noise), *side_effects(found, overflows)])


def by_loss(gap: float | None, noise: float | None) -> str:
    if gap is None or noise is None:
        return "no fp32 baseline"
    if abs(gap) <= noise:
        return f"as fp32 within the noise (gap {gap:+.4f})"
    times = f"{abs(gap) / noise:.1f} × the noise" if noise else "without any noise"
    return f"{'worse' if gap > 0 else 'better'} than fp32 by {abs(gap):.4f}, {times}"


def side_effects(found: RunMetrics, overflows: Sequence[int]) -> list[str]:
    """Lost updates, flushed gradients and overflows."""
    said = []
    if found.kept is not None and 1 - found.kept > LOST_UPDATES:
        said.append(f"lost updates: {1 - found.kept:.0%} rounded away, {found.unmoved:.0%} of the weights did not move")
    if found.flushed is not None and found.flushed > FLUSHED:
        said.append(f"{found.flushed:.1%} of the gradient's elements became 0")
    if overflows:
        said.append(f"{len(overflows)} steps left out by overflow, the last at {overflows[-1]}")
    return said
