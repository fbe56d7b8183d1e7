"""Seeds that a difference needs, against published tables and against draws."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lmworks.spec.errors import SpecError
from lmworks.tune.seeds import power, seed_noise, seed_table, seeds_needed


@pytest.mark.parametrize(("effect", "seeds"), [(0.2, 394), (0.5, 64), (0.8, 26), (1.0, 17), (1.2, 12)])
def test_sample_sizes_are_those_of_cohens_table(effect: float, seeds: int) -> None:
    """Two-sided t-test at 5 %, power 80 % (Cohen 1988, as G*Power and R's power.t.test give them)."""
    assert seeds_needed(effect, 1.0) == seeds


def test_power_is_how_often_a_t_test_finds_the_difference() -> None:
    from scipy import stats  # not by every worker that collects this file

    rng = np.random.default_rng(0)
    first, second = rng.normal(0, 1, (4000, 6)), rng.normal(1.5, 1, (4000, 6))
    found = (stats.ttest_ind(first, second, axis=1).pvalue < 0.05).mean()
    assert power(6, 1.5, 1.0) == pytest.approx(float(found), abs=0.02)


def test_the_spread_between_seeds_is_pooled_over_specs() -> None:
    rng = random.Random(0)
    runs = [
        ({"optim.lr": lr, "seed": seed}, loss * (1 + 0.01 * rng.gauss(0, 1)))
        for lr, loss in ((1e-3, 3.0), (1e-2, 4.0))
        for seed in range(40)
    ]
    noise = seed_noise(runs)
    assert noise.low < 0.01 < noise.high
    assert (noise.runs, noise.groups, noise.freedom) == (80, 2, 78)
    one = {row["difference"]: row for row in seed_table(noise)}[0.01]
    assert one["seeds_low"] <= one["seeds"] <= one["seeds_high"]
    assert 14 <= one["seeds"] <= 20  # an effect of one standard deviation: 17


def test_runs_that_differ_in_more_than_their_seed_are_no_measure_of_it() -> None:
    with pytest.raises(SpecError, match=r"seed\.values"):
        seed_noise([({"optim.lr": 1e-3}, 3.0), ({"optim.lr": 1e-2}, 3.1)])
