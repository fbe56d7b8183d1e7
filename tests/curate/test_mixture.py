"""Weights of mixtures: temperature by hand, laws and optima against grids and planted truths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lmworks.curate.mixture import Law, by_size, descend, fit, fit_law, mixtures_to_try
from lmworks.spec.errors import DataError, SpecError

TRUTH = [
    Law(2.0, 0.3, np.array([-1.5, 0.2, 0.0])),
    Law(1.5, 0.0, np.array([0.1, -2.0, -0.3])),
    Law(2.5, 0.5, np.array([0.0, -0.4, -1.0])),
]
NAMES = ("code", "web", "maths")
EQUAL = dict.fromkeys(NAMES, 1.0)


def test_temperature() -> None:
    tokens = {"large": 800, "small": 200}
    assert by_size(tokens, 1) == {"large": 0.8, "small": 0.2}
    assert by_size(tokens, 2) == {"large": 0.6667, "small": 0.3333}  # the roots are 2 to 1
    assert by_size(tokens, 1e6) == {"large": 0.5, "small": 0.5}
    with pytest.raises(SpecError, match="--temperature 0 is out of range"):
        by_size(tokens, 0)


def test_mixtures_to_try_reach_from_the_given_one_to_equal_shares() -> None:
    mixes = mixtures_to_try({"a": 0.6, "b": 0.3, "c": 0.1}, 2000, seed=1)
    assert mixes[0] == {"a": 0.6, "b": 0.3, "c": 0.1}
    mean = np.mean([list(mix.values()) for mix in mixes], axis=0)
    assert np.abs(mean - (np.array([0.6, 0.3, 0.1]) + 1 / 3) / 2).max() < 0.02
    assert all(abs(sum(mix.values()) - 1) < 0.001 and min(mix.values()) > 0 for mix in mixes)
    assert mixes == mixtures_to_try({"a": 0.6, "b": 0.3, "c": 0.1}, 2000, seed=1)


def test_a_law_is_recovered_from_its_values() -> None:
    shares = np.random.default_rng(0).dirichlet([1, 1, 1], 40)
    fresh = np.random.default_rng(1).dirichlet([1, 1, 1], 40)
    for truth in TRUTH:
        found = fit_law(shares, truth.loss(shares))
        assert np.abs(found.loss(fresh) - truth.loss(fresh)).max() < 0.01 * np.ptp(truth.loss(fresh)) + 0.002


def test_descent_finds_the_best_point_of_a_grid() -> None:
    for importance in ([1 / 3] * 3, [0.7, 0.2, 0.1], [0, 0, 1]):
        points = [p for p in itertools.product(np.arange(0, 1.001, 0.01), repeat=2) if sum(p) <= 1.0001]
        grid = np.array([[a, b, max(0.0, 1 - a - b)] for a, b in points])
        values = sum(weight * law.loss(grid) for weight, law in zip(importance, TRUTH, strict=True))
        found = descend(TRUTH, np.array(importance, float))
        value = sum(weight * float(law.loss(found)) for weight, law in zip(importance, TRUTH, strict=True))
        assert value <= np.min(values) + 1e-4


def test_fit_recommends_the_best_mixture_of_noisy_runs() -> None:
    draw = np.random.default_rng(3)
    mixes = mixtures_to_try(EQUAL, 24, seed=0)
    shares = np.array([list(mix.values()) for mix in mixes])
    shares /= shares.sum(axis=1, keepdims=True)
    losses = [
        {n: float(law.loss(row)) + draw.normal(0, 0.003) for n, law in zip(NAMES, TRUTH, strict=True)} for row in shares
    ]
    found = fit(mixes, losses, EQUAL)
    best = descend(TRUTH, np.full(3, 1 / 3))

    def value(point: np.ndarray) -> float:
        return float(np.mean([law.loss(point) for law in TRUTH]))

    chosen = np.array(list(found.weights.values()))
    assert value(chosen / chosen.sum()) - value(best) < 0.002
    assert value(best) < min(value(row) for row in shares)
    assert found.left_out_error < 0.2 * found.spread
    assert np.mean(list(found.predicted.values())) == pytest.approx(value(best), abs=0.005)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(DataError, match="5 runs are too few for 3 sources; try at least 9 mixtures"):
        fit([EQUAL] * 5, [EQUAL] * 5, EQUAL)
