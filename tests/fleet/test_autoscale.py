"""Autoscaling policies by what they want, and by what they cost and keep in the simulator."""

from __future__ import annotations

import pytest

from lmworks.fleet import results
from lmworks.fleet.autoscale import INTERVAL_S, STABLE_S, Observation, Policy, Predictive, Reactive, Static
from lmworks.fleet.generate import Traffic, generate
from lmworks.fleet.policies import make_policy, predictive
from lmworks.fleet.routing import make_router
from lmworks.fleet.server_model import ServerModel, StepTime, capacity
from lmworks.fleet.simulate import Run, simulate
from lmworks.fleet.trace import Arrival, Trace
from lmworks.plan.serving.plans import Slo
from lmworks.spec import SpecError

MODEL = ServerModel(
    StepTime(((0, 0.02), (16, 0.036)), prompt_token=1e-4),
    blocks=2000,
    max_seqs=16,
    startup_s=60.0,
    gpus=2,
    price_hour=3.0,
)


def seen(now: float, replicas: int = 2, waiting: int = 0, kv: float = 0.1, arrivals: int = 0) -> Observation:
    return Observation(now, replicas, 0, waiting, 0, kv, arrivals)


def test_reactive_takes_the_larger_of_two_metrics_and_waits_before_scaling_down() -> None:
    policy = Reactive(queue=4.0, kv_use=0.5)
    assert policy.wanted(seen(0.0, waiting=22)) == 6  # 22 / 4
    assert policy.wanted(seen(15.0, waiting=1, kv=0.9)) == 6
    assert policy.wanted(seen(STABLE_S + 5.0, waiting=1, kv=0.9)) == 4  # 2 × 0.9 / 0.5
    assert policy.wanted(seen(2 * STABLE_S + 25.0, waiting=1, kv=0.1)) == 1


def test_predictive_sees_a_trend_before_it_arrives() -> None:
    """10, 11, 12 … requests a second, one more each interval: eight intervals ahead there are about eight more."""
    policy = Predictive(capacity=1.0, ahead=8 * INTERVAL_S, headroom=1.0, level_gain=0.5, trend_gain=0.3)
    for step in range(60):
        wanted = policy.wanted(seen(step * INTERVAL_S, arrivals=round((10 + step) * INTERVAL_S)))
    assert wanted == pytest.approx(10 + 59 + 8, abs=1)


def test_predictive_remembers_yesterday() -> None:
    period = 40 * INTERVAL_S
    policy = Predictive(capacity=1.0, ahead=5 * INTERVAL_S, headroom=1.0, period=period)
    for step in range(75):  # 20 a second in the first half of each period, else 2; at 75 the high half is 5 steps away
        rate = 20 if step % 40 < 20 else 2
        policy.stabilised.wants.clear()
        wanted = policy.wanted(seen(step * INTERVAL_S, arrivals=round(rate * INTERVAL_S)))
    assert wanted > 8


def run(trace: Trace, policy: Policy, model: ServerModel = MODEL) -> Run:
    return simulate(trace, model, make_router("least_loaded"), policy, most=12, first=1)


def test_cost_by_hand() -> None:
    """Two servers of two GPUs for the 100 s until the last answer, at $3 an hour each."""
    trace = Trace((Arrival(0.0, 10, 2), Arrival(100.0, 10, 1)), 16)
    found = run(trace, Static(2))
    sheet = results.sheet(found, MODEL, Slo(ttft=0.5))
    end = 100.0 + 0.02 + 10 * 1e-4
    assert sheet["gpu_hours"] == pytest.approx(2 * 2 * end / 3600)
    assert sheet["dollars"] == pytest.approx(3 * 2 * 2 * end / 3600)
    assert sheet["goodput"]["share"] == 1.0
    assert sheet["requests_per_s"] == pytest.approx(2 / end)


def test_a_server_is_paid_for_while_it_starts_and_serves_after() -> None:
    """A queue at once: the autoscaler asks at its first look, and the second server is there `startup_s` later."""
    trace = Trace(tuple(Arrival(0.1 * n, 50, 100) for n in range(900)), 16)
    scaled, alone = run(trace, Reactive(queue=2.0)), run(trace, Static(1))
    assert scaled.most_servers > 1
    assert scaled.served[-1].ttft < alone.served[-1].ttft / 2
    second = INTERVAL_S + MODEL.startup_s  # when the second server is there, at the earliest
    early = [one for one in alone.served if one.last < second]
    assert early and early == list(scaled.served[: len(early)])
    assert scaled.server_seconds > alone.server_seconds


def test_autoscaling_costs_less_than_the_peak_and_keeps_more_than_the_mean() -> None:
    """A day of twenty minutes: servers for the mean miss the peak, those for the peak are idle for half of the day."""
    slo, model = Slo(ttft=2.0, tpot=0.1), MODEL.replace(startup_s=15.0, max_seqs=8)
    trace = generate("diurnal", Traffic(6.0, 100, 60, 1200.0, day=1200.0), seed=0)
    sheets = {
        policy.name: results.sheet(run(trace, policy, model), model, slo)
        for policy in (Static(2), Static(6), predictive(trace, model, slo, 0.0))
    }
    lean, generous, scaled = sheets.values()
    assert lean["goodput"]["share"] < 0.8 < 0.9 < scaled["goodput"]["share"]
    assert scaled["dollars"] < 0.85 * generous["dollars"]


def test_capacity_is_what_a_saturated_server_does() -> None:
    """Against the simulator: a queue that never ends, requests of equal lengths."""
    trace = Trace(tuple(Arrival(0.0, 100, 60) for _ in range(400)), 16)
    found = run(trace, Static(1))
    rate = 400 / found.served[-1].last
    assert capacity(MODEL, 100, 60) == pytest.approx(rate, rel=0.08)


def test_a_front_has_what_nothing_beats() -> None:
    sheets = [
        {"policy": name, "dollars": cost, "gpu_hours": 0.0, "goodput": {"share": share}}
        for name, cost, share in (("a", 1.0, 0.5), ("b", 2.0, 0.4), ("c", 3.0, 0.9), ("d", 3.0, 0.8), ("e", 4.0, 0.9))
    ]
    assert [point.policy for point in results.front(sheets) if point.best] == ["a", "c"]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(SpecError, match="predictive"):
        make_policy("predictiv", 1, Trace((Arrival(0.0, 1, 1),)), MODEL, Slo(), 0.0)
