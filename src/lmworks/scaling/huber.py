"""Huber regression on log-loss for laws that are a log-sum-exp of affine terms: hundreds of fits at once.

A law predicts log L = s · logsumexp_t(X_t · θ): E + A/N^α + B/D^β has the terms log E, log A − α log N and
log B − β log D, affine in θ = (log E, log A, α, log B, β), and s = 1; Kaplan's form has s = α_D. So one gradient and
one Hessian serve every law, and damped Newton steps, tens of them, do what takes L-BFGS hundreds. Starts and bootstrap
replicates are one batch: each has its own θ, targets and row weights.

With δ far below the residuals the objective is almost Σ|r|, and a Newton step holds for δ only; so δ is lowered in
stages from the size of the residuals to the value that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DELTA = 1e-3  # Hoffmann et al. 2022, section 3.3
WIDEST = 0.1  # δ of the first stage
FASTER = 0.25  # δ of a stage over that of the stage before it
STEPS = 100  # of a stage, at most
TOLERANCE = 1e-10  # a fit is done when a step is predicted to gain less of its objective


@dataclass(frozen=True)
class Terms:
    """`design` (points, terms, parameters), `offset` (points, terms): a term is design · θ + offset.

    `power`: the parameter that multiplies the log-sum-exp, or None.
    """

    design: Array
    power: int | None = None
    offset: Array | float = 0.0

    @property
    def parameters(self) -> int:
        return self.design.shape[2]

    @cached_property
    def products(self) -> Array:
        """Of every point and term the outer product of its row of the design: (points × terms, parameters²)."""
        return (self.design[..., :, None] * self.design[..., None, :]).reshape(-1, self.parameters**2)

    def log_loss(self, theta: Array) -> Array:
        """(fits, points) for θ of shape (fits, parameters)."""
        total, _ = log_sum_exp(self.terms(theta))
        return total if self.power is None else theta[:, self.power, None] * total

    def terms(self, theta: Array) -> Array:
        points, terms, parameters = self.design.shape
        return (theta @ self.design.reshape(-1, parameters).T).reshape(-1, points, terms) + self.offset

    def derivatives(self, theta: Array, slope: Array, curvature: Array) -> tuple[Array, Array]:
        """Gradient and Hessian of Σ_i ρ(log L_i), where ρ' is `slope` and ρ'' is `curvature` (fits, points)."""
        total, share = log_sum_exp(self.terms(theta))  # (k, i), (k, i, t)
        mean = np.einsum("kit,itp->kip", share, self.design)
        power = np.ones(len(theta)) if self.power is None else theta[:, self.power]
        jacobian = power[:, None, None] * mean
        # Hessian of a log-sum-exp: the covariance of its terms under the softmax
        spread = (slope * power[:, None])[..., None]
        squares = (spread * share).reshape(len(theta), -1) @ self.products
        hessian = squares.reshape(-1, self.parameters, self.parameters) - (spread * mean).transpose(0, 2, 1) @ mean
        if self.power is not None:
            jacobian[..., self.power] += total
            mixed = (slope[:, None] @ mean)[:, 0]
            hessian[:, self.power] += mixed
            hessian[:, :, self.power] += mixed
        hessian += (jacobian * curvature[..., None]).transpose(0, 2, 1) @ jacobian
        return (slope[:, None] @ jacobian)[:, 0], hessian


def log_sum_exp(z: Array) -> tuple[Array, Array]:
    """Over the last axis, and the softmax."""
    top = z.max(-1, keepdims=True)
    exps = np.exp(z - top)
    sums = exps.sum(-1, keepdims=True)
    return (top + np.log(sums))[..., 0], exps / sums


def huber(residuals: Array, delta: float) -> Array:
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))


@dataclass(frozen=True)
class Fits:
    theta: Array  # (fits, parameters)
    objective: Array  # (fits,): Σ w · huber


def fit(
    terms: Terms,
    targets: Array,
    starts: Array,
    delta: float = DELTA,
    weights: Array | None = None,
    widest: float = WIDEST,
) -> Fits:
    """`targets` and `weights`: log-losses and multiplicities, (points,) for all fits or (fits, points).

    `widest`: δ of the first stage; less of it where the starts are near.
    """
    theta = np.array(starts, dtype=float)
    shape = (len(theta), len(terms.design))
    y = np.broadcast_to(targets, shape)
    w = np.broadcast_to(1.0 if weights is None else weights, shape)
    for stage in stages(delta, widest):
        theta = newton(terms, y, w, theta, stage)
    return Fits(theta, (w * huber(terms.log_loss(theta) - y, delta)).sum(1))


def stages(delta: float, widest: float) -> list[float]:
    count = max(0, int(np.ceil(np.log(delta / widest) / np.log(FASTER))))
    return [*(widest * FASTER**stage for stage in range(count)), delta]


def newton(terms: Terms, y: Array, w: Array, start: Array, delta: float) -> Array:
    """Levenberg's damping on the whole Hessian, |eigenvalues| in place of negative ones; fits leave when done."""
    theta = start.copy()
    alive = np.arange(len(theta))
    damping = np.full(len(theta), 1e-3)
    value = (w * huber(terms.log_loss(theta) - y, delta)).sum(1)
    for _ in range(STEPS):
        here, targets, weights = theta[alive], y[alive], w[alive]
        residuals = terms.log_loss(here) - targets
        slope = weights * np.clip(residuals, -delta, delta)
        gradient, hessian = terms.derivatives(here, slope, weights * (np.abs(residuals) <= delta))
        scale = np.sqrt(np.maximum(np.abs(np.diagonal(hessian, axis1=1, axis2=2)), 1e-12 * delta))
        roots, basis = np.linalg.eigh(hessian / scale[:, :, None] / scale[:, None, :])
        along = np.einsum("kpq,kp->kq", basis, gradient / scale)
        step = along / (np.abs(roots) + damping[alive, None])
        predicted_gain = (along * step - 0.5 * np.abs(roots) * step**2).sum(1)
        trial = here - np.einsum("kpq,kq->kp", basis, step) / scale
        with np.errstate(over="ignore", invalid="ignore"):
            after = (weights * huber(terms.log_loss(trial) - targets, delta)).sum(1)
        gain = (value[alive] - after) / np.maximum(predicted_gain, 1e-300)
        better = gain > 1e-4  # False where `after` is not a number
        theta[alive[better]], value[alive[better]] = trial[better], after[better]
        faster = np.where(gain > 0.75, 0.2, np.where(gain > 0.25, 0.7, 4.0))
        damping[alive] = np.clip(damping[alive] * np.where(better, faster, 5.0), 1e-12, 1e12)
        done = (predicted_gain < TOLERANCE * value[alive]) | (damping[alive] >= 1e12)
        alive = alive[~done]
        if not alive.size:
            break
    return theta
