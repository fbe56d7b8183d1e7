"""Learning curves: planted laws come back, and intervals hold as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.tune.curves import fit, forecast, predicted_end

STEPS = np.geomspace(20, 640, 12).round()


def planted(floor: float, scale: float, exponent: float, noise: float = 0.0, seed: int = 0) -> dict[int, float]:
    rng = np.random.default_rng(seed)
    return {int(step): floor + scale * step**-exponent + noise * rng.standard_normal() for step in STEPS}


@pytest.mark.parametrize(("floor", "scale", "exponent"), [(2.0, 5.0, 0.3), (0.0, 8.0, 0.15), (3.0, 40.0, 1.0)])
def test_a_planted_power_law_is_continued(floor: float, scale: float, exponent: float) -> None:
    end = forecast(planted(floor, scale, exponent), 2560)
    assert end is not None
    assert end.loss == pytest.approx(floor + scale * 2560**-exponent, rel=3e-3)
    assert end.low <= end.loss <= end.high


def test_the_fit_is_the_least_squares_optimum() -> None:
    """Against scipy's bounded least squares from the planted start."""
    from scipy.optimize import least_squares

    curve = planted(2.0, 5.0, 0.3, 0.02)
    steps, losses = np.array(list(curve), dtype=float), np.array(list(curve.values()))
    law = fit(steps, losses[:, None])
    theirs = least_squares(
        lambda p: p[0] + p[1] * steps ** -p[2] - losses, [2.0, 5.0, 0.3], bounds=([0] * 3, [9, 99, 3])
    )
    mine = float(((law(steps)[:, 0] - losses) ** 2).sum())
    assert mine <= 2 * theirs.cost * 1.01


def test_intervals_hold_the_planted_loss_as_often_as_they_say() -> None:
    """90 % over 200 noisy curves; twice the steps that were seen."""
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(1000 + seed)
        floor, scale, exponent = rng.uniform(1.5, 3), rng.uniform(3, 10), rng.uniform(0.2, 0.8)
        end = forecast(planted(floor, scale, exponent, 0.01, seed), 1280, seed=seed)
        assert end is not None
        truth = floor + scale * 1280**-exponent + 0.01 * rng.standard_normal()
        held += end.low <= truth <= end.high
    assert 0.83 <= held / 200 <= 0.97, held


def test_what_a_decay_does_at_the_end_is_learned_from_finished_trials() -> None:
    """Curves that drop by 0.3 at their last step, as under a learning rate that decays."""
    law = planted(2.0, 5.0, 0.3)
    finished = [{**planted(floor, 5.0, 0.3), 2560: floor + 5.0 * 2560**-0.3 - 0.3} for floor in (2.1, 2.2, 2.4)]
    plain, corrected = forecast(law, 2560), predicted_end(law, finished, 2560)
    assert plain is not None
    assert corrected is not None
    assert corrected.loss == pytest.approx(plain.loss - 0.3, abs=0.01)


@pytest.mark.parametrize("curve", [{}, {1: 3.0, 2: 2.0, 4: 1.5}, {1: 3.0, 2: 2.0, 4: float("inf"), 8: 1.0}])
def test_too_little_is_no_forecast(curve: dict[int, float]) -> None:
    assert forecast(curve, 100) is None
