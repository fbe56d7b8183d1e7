"""Pearson's chi-square test of counts."""

from __future__ import annotations

import numpy as np
import torch


def chi_square(seen: np.ndarray, expected: np.ndarray, freedom: int | None = None) -> float:
    """Probability of counts at least so far from what is expected; `freedom`: one less than there are counts."""
    distance = float(((seen - expected) ** 2 / expected).sum())
    halves = torch.tensor([(seen.size - 1 if freedom is None else freedom) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def uniform(values: np.ndarray, kinds: int) -> float:
    """Whether whole numbers below `kinds` come up equally often."""
    return chi_square(np.bincount(values, minlength=kinds), np.full(kinds, len(values) / kinds))


def independent(first: np.ndarray, second: np.ndarray, kinds: int) -> float:
    """Whether one of two whole numbers below `kinds` says anything about the other."""
    table = np.bincount(first.astype(np.int64) * kinds + second, minlength=kinds * kinds).reshape(kinds, kinds)
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return chi_square(table, expected, freedom=(kinds - 1) ** 2)
