"""A run is priced again after ten steps: what they took counts, what was predicted before stays as it was written."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.predict import step_flops
from lmworks.plan.reprice import STEPS, WARM_UP, Progress, second_price
from lmworks.record import RunFolder, read_metrics
from lmworks.report.predicted_vs_measured import compare
from lmworks.report.run_report import write_report
from lmworks.spec import RunSpec
from lmworks.train import Trainer
from lmworks.train.reprice import Repricer
from tiny import make_spec
from typed import lmworks

PARTS = {"matmul": 0.06, "attention": 0.02, "communication": 0.04}
MOE = ("model.experts=4", "model.top_k=2")


def line(seconds: float, data: float = 0.0) -> dict[str, float]:
    return {"step_s": seconds, "data_s": data, "forward_backward_s": 0.6 * seconds}


def spec(**more: Any) -> RunSpec:
    table = {"model": {"preset": "tiny"}, "optim": {"steps": 100}, "log": {"eval_every": 30}, **more}
    return RunSpec.from_dict(table)


def test_parts_have_factors_of_their_own() -> None:
    """Without the fastest and the slowest step: 0.2 s, of which 0.05 s wait for data and 30 % for other ranks."""
    lines = [line(9.0, 8.0), *[line(0.2, 0.05)] * 6, line(0.001)]
    found = second_price(spec(), {"step_parts": PARTS}, lines, Progress(10, 12.0, 0.3, 5))
    assert found.step_s == pytest.approx(0.2) and found.data_s == pytest.approx(0.05)
    assert found.communication_s == pytest.approx(0.06) and found.compute_s == pytest.approx(0.09)
    assert found.compute_factor == pytest.approx(0.09 / 0.08)
    assert found.communication_factor == pytest.approx(0.06 / 0.04)
    assert found.run_s == pytest.approx(12.0 + 90 * 0.2)
    assert found.tokens_per_s == pytest.approx(spec().tokens_per_step / 0.2)
    # steps 30, 60 and 90, and after the last one: 5 forward passes, each a third of 0.12 s
    assert found.evaluations_s == pytest.approx(4 * 5 * 0.12 / 3)
    assert found.dollars is None


def test_what_was_not_told_apart_has_one_factor() -> None:
    found = second_price(spec(), {"step_parts": PARTS}, [line(0.24)] * 8, Progress(10, 2.4, None, 1))
    assert found.communication_s is found.communication_factor is None
    assert found.compute_factor == pytest.approx(2.0)
    silent = second_price(spec(), {}, [line(0.24)] * 8, Progress(10, 2.4, 0.0, 1))
    assert silent.compute_factor is None and silent.run_s == pytest.approx(100 * 0.24)


def test_cost_and_stages_to_come() -> None:
    """The second stage has twice the sequence, of which attention is more than twice as much."""
    stages = [{"steps": 60, "data": {"seq": 128}}, {"steps": 40, "data": {"seq": 256}}]
    model = {"preset": "tiny", "context": 256}
    whole = spec(model=model, stages=stages, cluster={"price_hour": 36.0})
    found = second_price(whole, {}, [line(0.1)] * 8, Progress(10, 1.0, 0.0, 1))
    share = step_flops(whole.stage(1)).hardware / step_flops(whole.stage(0)).hardware
    assert share > 2
    assert found.run_s == pytest.approx(1.0 + 50 * 0.1 + 40 * 0.1 * share)
    assert found.dollars == pytest.approx(found.run_s * 0.01)


def far_off() -> Machine:
    """Ten times as slow as any machine that runs this."""
    rates = {kind: (Rate((1e6,), 5e6),) for kind in ("stream", "strided", "exp", "tanh", "optimizer")}
    rates |= {name: (Rate((64, 64, 64), 2e7),) for name in ("gemm.fp32",)}
    rates |= {f"{kind}.fp32": (Rate((32, 16), 2e7),) for kind in ("attention", "attention_backward")}
    return Machine("a slow CPU", "cpu", "measured", rates, 1e-4, 1e-4, 2**34)


@pytest.mark.parametrize("words", [(), MOE])
def test_a_run_is_priced_again_and_resumed(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    trainer = Trainer(make_spec(dataset, "optim.steps=26", *words), run, machine=far_off(), quiet=True)
    before = json.loads(trainer.folder.prediction_path.read_text())
    trainer.until = 12
    trainer.run()
    Trainer.resume(run, quiet=True).run()
    folder = RunFolder(run)
    now = json.loads(folder.prediction_path.read_text())
    first, second = now.pop("after_steps")
    assert now == before and before["run_s"] == pytest.approx(26 * before["step_s"])
    assert [(one["attempt"], one["step"], one["steps"]) for one in (first, second)] == [(0, 10, 8), (1, 22, 8)]
    steps = read_metrics(folder.metrics_path)
    taken = [sum(step["step_s"] for step in steps[:count]) for count in (10, 22, 26)]
    for one, sofar, left in ((first, taken[0], 16), (second, taken[1], 4)):
        assert one["run_s"] == pytest.approx(sofar + left * one["step_s"])
        assert one["compute_factor"] < 1 and one["communication_s"] == 0
        assert one["step_s"] == pytest.approx(one["compute_s"] + one["data_s"])
        assert datetime.fromisoformat(one["ends"]).tzinfo is not None
    rows = {row.name: row for row in compare(folder, steps)}
    step = rows["step_s"]
    assert step.predicted == before["step_s"] and step.after == second["step_s"] and step.measured
    assert abs(math.log(second["step_s"] / step.measured)) < abs(math.log(before["step_s"] / step.measured)) / 2
    assert rows["run_s"].measured == pytest.approx(taken[2]) and rows["run_s"].after == second["run_s"]

    code, text, err = lmworks(capsys, "runs", "show", str(run))
    assert code == 0, err
    assert "after 10 steps" in text and "after 22 steps the last one was expected at" in text
    told = json.loads(lmworks(capsys, "runs", "show", str(run), "--json")[1])
    assert told["after_steps"] == [first, second]
    assert {row["name"]: row["after"] for row in told["predicted"]}["step_s"] == second["step_s"]
    assert "after 10 steps" in write_report(folder).read_text()


def test_a_run_of_nine_steps_has_one_price(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_spec(dataset, "optim.steps=9"), tmp_path / "run", machine=far_off(), quiet=True)
    trainer.run()
    assert "after_steps" not in json.loads(trainer.folder.prediction_path.read_text())
    rows = compare(trainer.folder, read_metrics(trainer.folder.metrics_path))
    assert {row.after for row in rows} == {None}


def test_a_damaged_prediction_does_not_end_the_run(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_spec(dataset), tmp_path / "run", quiet=True)
    trainer.folder.prediction_path.write_text("[")
    trainer.run()
    assert len(json.loads(trainer.folder.prediction_path.read_text())["after_steps"]) == 1


@pytest.mark.parametrize(("samples", "share"), [(10, 0.25), (2, None)])
def test_the_share_of_samples_after_warm_up_is_communication(
    dataset: Path, tmp_path: Path, samples: int, share: float | None
) -> None:
    """In the warm-up all wait for the one that compiles; few samples of short steps tell nothing."""
    whole = make_spec(dataset, "optim.steps=20")
    folder = RunFolder.create(tmp_path / "run", whole)
    watchdog = SimpleNamespace(sampled=0, waited=0)
    repricer = Repricer(whole, folder, 0, 1, watchdog)  # type: ignore[arg-type]
    for step in range(1, STEPS + 1):
        watchdog.sampled += samples
        watchdog.waited += samples if step <= WARM_UP else samples // 4 + step % 2
        repricer.add(step, line(0.1))
    (entry,) = json.loads(folder.prediction_path.read_text())["after_steps"]
    assert entry["communication_s"] == (None if share is None else pytest.approx(0.1 * share))
