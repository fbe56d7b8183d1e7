"""Hours, dollars, energy and failures: against arithmetic by hand, Llama 3's own account, and a simulated cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmworks.plan.money import Site, between_stops, bill, goodput, save_every
from lmworks.spec import SpecError

CALM = Site(stops_per_gpu_hour=0.0)
LLAMA_GPUS = 16_384


def test_without_stops_it_is_plain_arithmetic() -> None:
    found = bill(1e12, 1e6, 64, price_hour=2.0, tdp_w=700, busy=0.9, site=CALM)
    assert found.hours == pytest.approx(1e6 / 3600, rel=1e-4)
    assert found.gpu_hours == pytest.approx(17_777.8, rel=1e-4)
    assert found.dollars == pytest.approx(35_555.6, rel=1e-4)
    # (0.1 + 0.85 · 0.9 + 0.5) · 700 W = 955.5 W a GPU, 1.2 times that for the building
    assert found.kwh == pytest.approx(17_777.8 * 0.9555 * 1.2, rel=1e-4)
    assert found.goodput == pytest.approx(1, rel=1e-4)
    assert found.stops == 0


def test_stops_of_llama_3() -> None:
    """419 in 54 days, one every 3.1 hours, and over 90% of the time in training."""
    site = Site()
    assert between_stops(LLAMA_GPUS, site) == pytest.approx(54 * 86_400 / 419)
    assert 0.90 < goodput(LLAMA_GPUS, site) < 0.95
    days = bill(54 * 86_400 * 1.0, goodput(LLAMA_GPUS, site) ** -1, LLAMA_GPUS)
    assert days.stops == pytest.approx(419)


def test_gpu_hours_of_llama_3() -> None:
    """405B parameters, 15.6T tokens at 400 TFLOP/s a GPU; its model card says 30.84 million hours."""
    speed = 400e12 * LLAMA_GPUS / (6 * 405e9)
    found = bill(15.6e12, speed, LLAMA_GPUS, tdp_w=700)
    assert found.gpu_hours == pytest.approx(30.84e6, rel=0.08)


def test_a_node_draws_what_was_measured() -> None:
    """8 H100s and their host: 8.4 kW at most (arXiv 2412.08602), 76% of 10.2 kW in training (arXiv 2506.14551)."""
    for busy, kilowatts in ((1.0, 8.4), (0.9, 0.76 * 10.2)):
        hour = bill(3600, 1.0, 8, tdp_w=700, busy=busy, site=replace(CALM, pue=1.0))
        assert hour.kwh == pytest.approx(kilowatts, rel=0.05)


def test_the_interval_by_hand_and_that_it_is_the_best() -> None:
    site = Site(stops_per_gpu_hour=1 / 6000, save_s=60, restart_s=600)
    assert between_stops(1000, site) == pytest.approx(6 * 3600)
    best = save_every(1000, site)
    assert best == pytest.approx(np.sqrt(2 * 60 * 21_600))
    assert goodput(1000, site) > max(goodput(1000, site, best / 2), goodput(1000, site, 2 * best))
    # to first order 1 − δ/τ − (τ/2 + R)/M
    assert goodput(1000, site) == pytest.approx(1 - 60 / best - (best / 2 + 600) / 21_600, abs=0.01)


def test_goodput_of_a_simulated_cluster() -> None:
    """Stops at random, also while a save or a restart is under way."""
    site = Site(stops_per_gpu_hour=1e-4, save_s=60, restart_s=400)
    gpus, stretch, random = 5000, 1200.0, np.random.default_rng(0)
    mean = float(between_stops(gpus, site))
    clock, done, left = 0.0, 0, float(random.exponential(mean))
    while done < 20_000:
        if left >= stretch + 60:
            clock, left, done = clock + stretch + 60, left - stretch - 60, done + 1
            continue
        clock, left = clock + left, float(random.exponential(mean))
        while left < 400:  # stopped again before it trains
            clock, left = clock + left, float(random.exponential(mean))
        clock, left = clock + 400, left - 400
    assert goodput(gpus, site, stretch) == pytest.approx(done * stretch / clock, rel=0.01)


def test_a_larger_cluster_loses_more_and_many_are_priced_at_once() -> None:
    gpus = np.array([8, 512, 16_384])
    found = bill(1e12, 1e4 * gpus, gpus, price_hour=2.0, tdp_w=700)
    assert np.all(np.diff(found.goodput) < 0) and np.all(np.diff(found.dollars) > 0)
    one = bill(1e12, 1e4 * 512, 512, price_hour=2.0, tdp_w=700)
    assert found.kwh[1] == pytest.approx(one.kwh)  # type: ignore[index]


def test_nonsense_is_named() -> None:
    with pytest.raises(SpecError, match="gpus = -8: give more than 0"):
        bill(1e9, 1e3, -8)
    with pytest.raises(SpecError, match=r"busy = 1.5: give a share"):
        bill(1e9, 1e3, 8, busy=1.5)
    with pytest.raises(SpecError, match=r"save_s = 0: give more than 0"):
        bill(1e9, 1e3, 8, site=Site(save_s=0))
    with pytest.raises(SpecError, match=r"pue = 0.9: give 1 or more"):
        bill(1e9, 1e3, 8, site=Site(pue=0.9))
