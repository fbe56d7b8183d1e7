"""Fits of α and β: planted values are found, also where a library changes its protocol; one line is one regime."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.plan.devices.alpha_beta import AlphaBeta, fit_alpha_beta

SIZES = [1024.0 * 4**power for power in range(11)]  # 1 KiB to 1 GiB


def noisy(seconds: np.ndarray, seed: int, spread: float = 0.03) -> list[float]:
    return list(seconds * np.random.default_rng(seed).lognormal(0, spread, len(seconds)))


def test_planted_values_are_found_and_lie_in_their_intervals() -> None:
    """Of two hundred 95 % intervals, nine in ten or more hold the planted value."""
    alpha, beta, inside = 50e-6, 1 / 10e9, 0
    for seed in range(100):
        found = fit_alpha_beta(SIZES, noisy(alpha + beta * np.array(SIZES), seed))
        assert len(found.regimes) == 1, seed
        regime = found.last
        assert regime.alpha == pytest.approx(alpha, rel=0.1) and regime.beta == pytest.approx(beta, rel=0.1)
        assert regime.alpha_range[1] < 1.2 * alpha and regime.beta_range[1] < 1.2 * beta
        inside += regime.alpha_range[0] < alpha < regime.alpha_range[1]
        inside += regime.beta_range[0] < beta < regime.beta_range[1]
    assert 180 <= inside <= 199


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_protocol_is_a_second_regime(seed: int) -> None:
    """Low latency up to 256 KiB, then a protocol that starts later and moves bytes five times as fast."""
    x = np.array(SIZES)
    planted = np.where(x <= 2**18, 10e-6 + x / 2e9, 90e-6 + x / 10e9)
    found = fit_alpha_beta(SIZES, noisy(planted, seed, 0.02))
    assert len(found.regimes) == 2
    small, large = found.regimes
    assert 2**18 < large.above < 2**20
    assert small.alpha == pytest.approx(10e-6, rel=0.1) and small.beta == pytest.approx(1 / 2e9, rel=0.1)
    assert large.beta == pytest.approx(1 / 10e9, rel=0.05)
    assert found.seconds(SIZES) == pytest.approx(planted, rel=0.1)


def test_a_disturbed_point_moves_nothing() -> None:
    planted = 20e-3 + np.array(SIZES[:8]) / 12.5e6
    seconds = noisy(planted, 1, 0.01)
    seconds[2] *= 3
    found = fit_alpha_beta(SIZES[:8], seconds)
    assert len(found.regimes) == 1
    assert found.last.alpha == pytest.approx(20e-3, rel=0.04) and found.last.beta == pytest.approx(1 / 12.5e6, rel=0.02)


def test_figures_of_a_profile_come_back() -> None:
    found = fit_alpha_beta(SIZES, noisy(2e-3 + np.array(SIZES) / 25e6, 0))
    read = AlphaBeta.from_dict(found.to_dict())
    assert read.seconds(SIZES) == pytest.approx(found.seconds(SIZES), rel=1e-4)
    assert read.to_dict() == found.to_dict()


def test_latency_and_bandwidth_are_never_negative() -> None:
    falling = fit_alpha_beta([1e3, 1e4, 1e5], [3e-3, 2e-3, 1e-3])
    assert falling.last.beta == 0 and falling.last.alpha > 0
    steep = fit_alpha_beta([1e3, 1e4, 1e5], [1e-6, 2e-5, 3e-4])
    assert steep.last.alpha == 0 and steep.last.beta > 0


def test_two_sizes_make_a_line_without_an_interval() -> None:
    found = fit_alpha_beta([1000, 2000], [2e-3, 3e-3])
    assert found.last.alpha == pytest.approx(1e-3) and found.last.beta == pytest.approx(1e-6)
    assert np.isnan(found.last.alpha_range).all()
    assert found.to_dict()["alpha_us_low"] == found.to_dict()["alpha_us"]
    with pytest.raises(ValueError, match="two sizes"):
        fit_alpha_beta([1000], [1e-3])
