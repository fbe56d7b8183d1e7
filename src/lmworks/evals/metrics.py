"""Scores: what one answer is worth, and what those of all problems come to, with an interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    about: str
    higher_is_better: bool = True


METRICS: Mapping[str, Metric] = {
    "pass": Metric("the answer's program passes all its tests; as pass@k, unbiased"),
    "exact": Metric("the answer is the reference, but for spaces at its ends"),
    "edit": Metric("edit similarity with the reference: 1 − Levenshtein distance / longer length"),
    "resolves": Metric("the name that the answer begins with is there in what was imported"),
    "numeric": Metric("the final number is the reference's"),
    "contains": Metric("the answer holds the reference"),
    "recall": Metric("share of the references that the answer holds"),
    "accuracy": Metric("the right choice has the highest log-likelihood"),
    "accuracy_norm": Metric("the same, of log-likelihood per character of the choice"),
    "nll": Metric("negative log-likelihood of a token, in nats: the mean over all tokens", higher_is_better=False),
    "bits_per_byte": Metric("negative log-likelihood of a byte, in bits: over all bytes", higher_is_better=False),
}


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples is correct, unbiased: 1 − C(n − c, k) / C(n, k) (Chen et al. 2021)."""
    if k > samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))


def bootstrap(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> Estimate:
    """Mean with a percentile interval over resampled problems. With weights, a ratio: Σ values·weights / Σ weights."""
    scores = np.asarray(values, np.float64)
    mass = np.ones_like(scores) if weights is None else np.asarray(weights, np.float64)
    value = float((scores * mass).sum() / mass.sum())
    if len(scores) == 1:
        return Estimate(value, value, value)
    draw = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for at in range(RESAMPLES):
        chosen = draw.integers(0, len(scores), len(scores))
        means[at] = (scores[chosen] * mass[chosen]).sum() / mass[chosen].sum()
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


# --- texts -----------------------------------------------------------------------------------------------


def edit_similarity(one: str, other: str) -> float:
    """1 − Levenshtein distance / length of the longer."""
    longer = max(len(one), len(other))
    return 1.0 - levenshtein(one, other) / longer if longer else 1.0


def levenshtein(one: str, other: str) -> int:
    """Row by row; the minimum along a row is one running minimum, as costs of insertion are 1."""
    if one == other:
        return 0
    letters = np.array([ord(letter) for letter in other], np.int64)
    steps = np.arange(len(other) + 1)
    row = steps.copy()
    for place, letter in enumerate(one, 1):
        best = np.empty_like(row)
        best[0] = place
        best[1:] = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


TEXT_METRICS: Mapping[str, Callable[[str, str], float]] = {
    "exact": lambda text, answer: float(text.strip() == answer.strip()),
    "edit": lambda text, answer: edit_similarity(text.strip(), answer.strip()),
    "contains": lambda text, answer: float(answer.strip() in text),
}
