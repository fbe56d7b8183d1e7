"""How often to save and what stops cost: against Young, Daly, the sources, hand-made cases and a slow clock."""

from __future__ import annotations

import heapq
import math
import random

import numpy as np
import pytest

from lmworks.plan.reliability import (
    RATES,
    Recovery,
    Storage,
    best_every,
    best_steps,
    ettr,
    forecast,
    mtbf,
    progress,
    simulate,
    young,
)
from lmworks.spec import SpecError


def daly_every(stall: float, mean: float) -> float:
    """Daly 2006: the best interval, as a series in δ/2M."""
    small = stall / (2 * mean)
    return math.sqrt(2 * stall * mean) * (1 + math.sqrt(small) / 3 + small / 9) - stall


def daly_time(work: float, every: float, stall: float, restart: float, mean: float) -> float:
    """The same: wall time of so much work."""
    return mean * math.exp(restart / mean) * (math.exp((every + stall) / mean) - 1) * work / every


@pytest.mark.parametrize("stall", [0.5, 30.0, 600.0])
@pytest.mark.parametrize("hours", [0.5, 3.1, 100.0])
def test_the_formulas_of_young_and_daly(stall: float, hours: float) -> None:
    mean = hours * 3600
    recovery = Recovery(mean, stall, restart_s=300.0)
    best = float(best_every(recovery))
    assert best == pytest.approx(daly_every(stall, mean), rel=5e-3)
    if stall < mean / 1000:
        assert best == pytest.approx(float(young(stall, mean)), rel=0.02)
    for every in (best / 3, best, 3 * best):
        assert ettr(every, recovery) == pytest.approx(1e6 / daly_time(1e6, every, stall, 300.0, mean))
    near = best * np.linspace(0.5, 2, 301)
    assert near[np.argmax(ettr(near, recovery))] == pytest.approx(best, rel=0.005)


def test_published_rates() -> None:
    """The mean times between stops that the sources state themselves: 419 in 54 days; 1.8 hours for 16,384 GPUs."""
    assert mtbf(16_384, RATES["llama3"]) == pytest.approx(54 * 86_400 / 419)
    assert mtbf(16_384, RATES["rsc1"]) == pytest.approx(1.8 * 3600, rel=0.01)
    assert mtbf(131_072, RATES["rsc1"]) == pytest.approx(0.23 * 3600, rel=0.03)
    assert mtbf(16_384, RATES["rsc1"]) / mtbf(16_384, RATES["rsc2"]) == pytest.approx(2.34 / 6.5)


@pytest.mark.parametrize(
    "recovery",
    [
        Recovery(11_000.0, 30.0, restart_s=300.0),  # Daly's own assumptions
        Recovery(2_000.0, 60.0, restart_s=900.0, detect_s=120.0),  # stops while it starts again matter
        Recovery(3_000.0, 2.0, write_s=100.0, restart_s=200.0),  # asynchronous
        Recovery(1_000.0, 5.0, write_s=400.0, restart_s=60.0, detect_s=30.0),  # a write that snapshots wait for
    ],
)
def test_simulated_runs_agree_with_the_formula(recovery: Recovery) -> None:
    every = float(best_every(recovery)) * np.array([0.25, 0.5, 1.0, 2.0, 4.0])
    found = simulate(every, recovery, days=20, trials=300, seed=3)
    np.testing.assert_allclose(found.ettr.mean(axis=0), ettr(every, recovery), rtol=0.01)
    assert found.ettr.mean(axis=0).argmax() == 2
    np.testing.assert_allclose(found.ettr + found.replay + found.save + found.restart, 1.0)


def test_simulated_runs_agree_with_a_clock_that_plays_every_event() -> None:
    """One by one: trained, snapshot, written, stop, noticed, started; nothing of the formulas is used."""
    mean, every, stall, write, start, notice = 700.0, 90.0, 8.0, 130.0, 60.0, 25.0
    dice, end = random.Random(5), 30 * 86_400.0
    clock, useful, stop = 0.0, 0.0, dice.expovariate(1 / mean)
    work = saved = 0.0
    writes: list[tuple[float, float]] = []  # (when it is written, the work in it)

    def until(moment: float) -> bool:
        """Go on to the moment, unless a stop comes before."""
        nonlocal clock, saved
        clock = min(moment, stop)
        while writes and writes[0][0] <= clock:
            saved = heapq.heappop(writes)[1]
        return moment <= stop

    while clock < end:
        if until(clock + every):
            work += every
            if (not writes or until(writes[0][0])) and until(clock + stall):
                heapq.heappush(writes, (clock + write, work))
                continue
        useful, work = saved, saved
        writes.clear()
        while True:
            clock += notice
            stop = clock + dice.expovariate(1 / mean)
            if until(clock + start):
                break
    recovery = Recovery(mean, stall, write, start, notice)
    found = simulate(every, recovery, days=30, trials=50, seed=1)
    assert useful / clock == pytest.approx(found.ettr.mean(), rel=0.02)
    assert useful / clock == pytest.approx(float(ettr(every, recovery)), rel=0.02)


def test_progress_by_hand() -> None:
    """Train 100, stall 10; written 30 later: the save of 0-110 counts from 140, that of 110-220 from 250."""
    up = np.array([[0.0], [60.0], [105.0], [139.0], [141.0], [249.0], [251.0]])
    trained, kept = progress(up, np.array([100.0]), Recovery(1.0, 10.0, write_s=30.0))
    assert trained[:, 0].tolist() == [0, 60, 100, 129, 131, 229, 231]
    assert kept[:, 0].tolist() == [0, 0, 0, 0, 100, 100, 200]
    # A write of 250: the second snapshot begins at 360, not at 210, and counts from 620; training waits from 210 on.
    trained, kept = progress(
        np.array([[215.0], [365.0], [619.0], [620.0]]), np.array([100.0]), Recovery(1.0, 10.0, 250.0)
    )
    assert trained[:, 0].tolist() == [200, 200, 300, 300]
    assert kept[:, 0].tolist() == [0, 100, 100, 200]


def test_a_run_without_stops_loses_only_its_saves() -> None:
    found = simulate(90.0, Recovery(1e12, 10.0, restart_s=300.0), days=1, trials=3)
    np.testing.assert_allclose(found.ettr, 0.9)
    np.testing.assert_allclose(found.save, 0.1)
    assert found.stops.tolist() == [0, 0, 0]


def test_the_seed_decides_and_intervals_meet_the_same_stops() -> None:
    recovery = Recovery(5_000.0, 10.0, restart_s=100.0)
    first, again = (simulate(np.array([300.0, 600.0]), recovery, trials=5, seed=9) for _ in range(2))
    np.testing.assert_array_equal(first.ettr, again.ettr)
    assert np.any(simulate(300.0, recovery, trials=5, seed=10).ettr[:, 0] != first.ettr[:, 0])
    np.testing.assert_array_equal(simulate(600.0, recovery, trials=5, seed=9).ettr[:, 0], first.ettr[:, 1])


def test_asynchronous_saves_gain_what_they_hide() -> None:
    hidden = Recovery(6_480.0, 1.0, write_s=60.0, restart_s=300.0)
    shown = hidden.synchronous()
    assert (shown.stall_s, shown.write_s) == (61.0, 0.0)
    assert best_every(hidden) < best_every(shown) / 5
    # To first order: √(2δ/M) for saves and replay at the best interval, w/M for the unwritten save, R/M for starting.
    assert ettr(best_every(shown), shown) == pytest.approx(1 - math.sqrt(2 * 61 / 6480) - 300 / 6480, abs=0.02)
    assert ettr(best_every(hidden), hidden) == pytest.approx(1 - math.sqrt(2 / 6480) - 360 / 6480, abs=0.02)
    assert best_every(Recovery(6_480.0, 0.01, write_s=500.0)) == 500.0  # no use in snapshots that wait


def test_whole_steps() -> None:
    recovery = Recovery(11_135.0, 30.0)
    best = float(best_every(recovery))
    assert best_steps(best / 9.99, recovery) in (9, 10)
    for step_s in (0.1, 7.0, 300.0, 5_000.0):
        steps = best_steps(step_s, recovery)
        others = [other for other in (steps - 1, steps + 1) if other]
        assert ettr(steps * step_s, recovery) > max(ettr(other * step_s, recovery) for other in others)


def test_a_forecast_is_what_its_parts_say() -> None:
    recovery = Recovery(6_480.0, 2.0, write_s=30.0, restart_s=300.0, detect_s=30.0)
    found = forecast(16_384, "asynchronous", recovery, 6.0, days=20, trials=100, seed=1, used=300)
    assert found.every == best_steps(6.0, recovery)
    assert found.mean == found.curve[found.every] == pytest.approx(found.ettr, rel=0.01)
    assert found.mean + found.replay + found.save + found.restart == pytest.approx(1)
    assert found.curve[300] < found.curve[found.every]
    assert found.worst < found.mean
    alone = simulate(300 * 6.0, recovery, days=20, trials=100, seed=1)
    assert found.curve[300] == pytest.approx(float(alone.ettr.mean()))


def test_the_time_of_a_save() -> None:
    """0.3 GB a rank: 16,384 of them get 122 MB/s each of 2 TB/s, 8 of them their own 1 GB/s."""
    stall, write = Storage().seconds(0.3e9, 16_384)
    assert (stall, write) == (pytest.approx(0.012), pytest.approx(0.3e9 * 16_384 / 2e12))
    assert Storage().seconds(0.3e9, 8)[1] == pytest.approx(0.3)


def test_nonsense_is_named() -> None:
    with pytest.raises(SpecError, match="mtbf_s = 0: give more than 0"):
        ettr(60.0, Recovery(0, 1.0))
    with pytest.raises(SpecError, match=r"restart_s = -1.0: give 0 or more"):
        best_every(Recovery(100.0, 1.0, restart_s=-1.0))
    with pytest.raises(SpecError, match="every_s = 0: give more than 0"):
        simulate(0, Recovery(100.0, 1.0))
    with pytest.raises(SpecError, match=r"54 days with a stop every 1 s are 4.67e\+06 stops; simulate fewer days"):
        simulate(60.0, Recovery(1.0, 1.0))
