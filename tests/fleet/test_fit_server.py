"""Fitted step times: planted ones come back, from what a client sees of a simulated server."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from lmworks.fleet.autoscale import Static
from lmworks.fleet.fit import Measured, fit, read_outcomes
from lmworks.fleet.routing import make_router
from lmworks.fleet.server import Leap, Sequence, Server
from lmworks.fleet.server_model import ServerModel, StepTime, linear_steps
from lmworks.fleet.simulate import simulate
from lmworks.fleet.trace import Arrival, Trace
from lmworks.plan.serving.batching import Lengths
from lmworks.plan.serving.plans import Demand, Slo, choose
from lmworks.plan.serving.served_model import ServedModel
from lmworks.spec import SpecError, catalogue, load_run
from lmworks.spec.hardware import find_gpu_name

PLANTED = StepTime(((0, 0.030), (9, 0.048)), key=2e-5, prompt_token=3e-4)
MODEL = ServerModel(PLANTED, blocks=4000, max_seqs=8, max_batch_tokens=512, request_s=0.015)


def outcomes(monkeypatch: pytest.MonkeyPatch, jitter: float) -> list[Measured]:
    """Times of all tokens, each seen a little later than its step ended."""
    rng, times = random.Random(0), dict[int, list[float]]()
    advance = Server.advance

    def noted(self: Server, sequence: Sequence, computed: int, tokens: int, leap: Leap) -> None:
        if tokens:
            times.setdefault(sequence.number, []).append(leap.end + rng.uniform(0, jitter))
        advance(self, sequence, computed, tokens, leap)

    monkeypatch.setattr(Server, "advance", noted)
    monkeypatch.setattr(Server, "alike", lambda self, decoding: 1)
    now, arrivals = 0.0, []
    for _ in range(150):
        arrivals.append(Arrival(now, rng.randint(10, 100), rng.randint(10, 60)))
        now += rng.expovariate(3.0)
    simulate(Trace(tuple(arrivals), 16), MODEL, make_router("round_robin"), Static(1))
    return [Measured(one.at, one.prompt, tuple(sorted(times[n]))) for n, one in enumerate(arrivals)]


def test_planted_step_times_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(outcomes(monkeypatch, jitter=0.002))
    assert found.steps.decoding(0) == pytest.approx(0.030, rel=0.05)
    assert found.steps.decoding(8) == pytest.approx(0.046, rel=0.05)
    assert found.steps.key == pytest.approx(2e-5, rel=0.15)
    assert found.steps.prompt_token == pytest.approx(3e-4, rel=0.05)
    assert found.request_s == pytest.approx(0.016, abs=0.002)  # the jitter's mean on top
    assert found.median_error < 0.03


def test_a_client_that_was_held_up_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For half a second of every five it reads nothing, and then several tokens at one time."""

    def read(at: float) -> float:
        return max(at, at // 5 * 5 + 0.5)

    held = [Measured(one.at, one.prompt, tuple(map(read, one.times))) for one in outcomes(monkeypatch, jitter=0.002)]
    found = fit(held)
    assert found.steps.decoding(0) == pytest.approx(0.030, rel=0.1)
    assert found.steps.decoding(8) == pytest.approx(0.046, rel=0.1)


def test_outcomes_of_bench_serve_are_read(tmp_path: Path) -> None:
    rows = [
        {"scheduled": 1.0, "prompt_tokens": 7, "times": [1.5, 1.6], "error": None, "status": 200},
        {"scheduled": 2.0, "prompt_tokens": 7, "times": [], "error": "status 429", "status": 429},
    ]
    path = tmp_path / "outcomes.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_outcomes(path) == [Measured(1.0, 7, (1.5, 1.6))]
    with pytest.raises(SpecError, match="1 steps can be told apart, and a fit needs 50"):
        fit(read_outcomes(path))
    path.write_text('{"scheduled": 1.0}\n')
    with pytest.raises(SpecError, match="line 1"):
        read_outcomes(path)


def test_a_server_file_is_read_back(tmp_path: Path) -> None:
    (path := tmp_path / "server.json").write_text(json.dumps(MODEL.to_dict()))
    assert ServerModel.read(path) == MODEL
    path.write_text("{}")
    with pytest.raises(SpecError, match="not a server"):
        ServerModel.read(path)


@pytest.mark.parametrize(("model", "gpu", "tp"), [("llama3-8b", "h100", 1), ("llama3-70b", "h200", 4)])
def test_planned_step_times_are_the_planners(model: str, gpu: str, tp: int) -> None:
    run = load_run(model, ())
    accelerator = catalogue("")[find_gpu_name(gpu, "")]
    demand = Demand(Lengths(1024, 256), Slo(), max_batch=256)
    plan = choose(ServedModel.of(run.model, run.name), accelerator, demand, tp=tp)[0]
    steps, deployment = linear_steps(plan), plan.deployment
    for batch, context in ((1, 1000), (10, 1200), (100, 1100)):
        assert steps.steps(1, batch, batch * context) == pytest.approx(float(deployment.step(batch, context)), rel=0.03)
    for prompt in (256, 1024, 4096):
        planned = float(deployment.step(0.0, 0.0, float(prompt), 0.0))
        assert steps.mixed(0, 0, prompt, prompt**2 / 2) == pytest.approx(planned, rel=0.1)
