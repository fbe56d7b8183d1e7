"""Ladders: exact counts, branches that are what a run of their own is, a holdout that is predicted first."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import TRUTH

import lmworks.cli.main  # which forked workers find loaded
import lmworks.cli.trial_imports  # noqa: F401
from lmworks.model import GPT
from lmworks.plan.flops import model_flops_per_token
from lmworks.scaling.fitting import fit_law
from lmworks.scaling.ladder import Ladder, plan
from lmworks.scaling.ladder_driver import PREDICTION, LadderDriver, Prediction, check_epochs, predict_holdout
from lmworks.spec import RunSpec, SpecError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.pool import Workers
from lmworks.sweep.space import Space
from lmworks.train import Trainer
from lmworks.train.optim import learning_rate
from tiny import make_spec
from typed import lmworks as run_cli

ISOFLOP = {"spec": "base.toml", "params": [2e6, 8e6, 32e6], "flops": [1e15, 1e16], "tokens_per_param": [2, 500]}
MUCH_TEXT = 10**12  # tokens
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn": 64, "shared_experts": 1}


def base(**model: Any) -> RunSpec:
    return RunSpec.from_dict(
        {"model": {"preset": "tiny", "vocab": 4096, "context": 512, **model}, "data": {"seq": 256}}
    )


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_runs_spend_their_budget_by_exact_counts(schedule: str, model: dict[str, Any]) -> None:
    spec = base(**model)
    for run in plan(Ladder.of({**ISOFLOP, "schedule": schedule}), spec):
        sweep = Sweep(Path(), "scaling", spec.to_dict(), Space(()))
        trial = sweep.spec(run.overrides)
        assert run.n == trial.model.params and run.n_no_embed == run.n - trial.model.vocab * trial.model.hidden
        assert run.d == trial.tokens_per_step * trial.optim.steps and trial.model.context >= 256
        assert run.flops == pytest.approx(run.d * model_flops_per_token(trial.model, 256))
        assert abs(run.flops / run.budget - 1) < run.batch / run.d
        assert min(abs(math.log(run.n / want)) for want in ISOFLOP["params"]) < math.log(1.15)


def test_models_have_as_many_layers_and_runs_as_many_tokens_as_are_asked_for() -> None:
    shallow = plan(Ladder.of(ISOFLOP), base())
    deep = plan(Ladder.of({**ISOFLOP, "min_layers": 6, "min_tokens": 5e7}), base())
    assert [run.overrides["model.layers"] for run in shallow] == [4, 4, 2]
    assert [run.overrides["model.layers"] for run in deep] == [6, 6, 6]
    assert min(run.d for run in shallow) < 5e7 <= min(run.d for run in deep)


def test_counts_are_those_of_the_network() -> None:
    run = plan(Ladder.of({**ISOFLOP, "params": [2e6], "flops": [1e15]}), base())[0]
    spec = Sweep(Path(), "scaling", base().to_dict(), Space(())).spec(run.overrides)
    assert sum(weight.numel() for weight in GPT(spec.model).parameters()) == run.n


def test_free_ladders_take_every_size_with_every_length() -> None:
    asked = Ladder.of(
        {"spec": "x", "params": [2e6, 8e6], "tokens": [1e7, 4e7], "seq": [128, 512], "batch_tokens": 8192}
    )
    runs = plan(asked, base())
    assert sorted((run.seq, round(run.d / 1e7)) for run in runs) == sorted([(128, 1), (128, 4), (512, 1), (512, 4)] * 2)
    assert {run.batch for run in runs} == {8192}
    with pytest.raises(SpecError, match=r"3\.0 times; max_epochs = 2"):
        check_epochs(replace(asked, max_epochs=2), runs, round(4e7 / 3), "data")


def test_every_run_is_held_to_as_many_tokens() -> None:
    """Micro-batches follow the batch, and context lengths differ; the base has 16 micro-batches of 32 × 256."""
    spec = base().replace(data=base().data.replace(micro_batch=32))
    rows = {"spec": "x", "params": [2e6], "tokens": [1e8], "seq": [128, 256, 512]}
    runs = [run for batch in (512, 2048, 65_536) for run in plan(Ladder.of({**rows, "batch_tokens": batch}), spec)]
    assert len({run.overrides["data.micro_batch"] for run in runs}) > 3
    for run in runs:
        trial = Sweep(Path(), "scaling", spec.to_dict(), Space(())).spec(run.overrides)
        assert trial.log.eval_batches * trial.data.micro_batch * trial.data.seq == 16 * 32 * 256


def test_a_branch_leaves_where_its_own_rate_begins_to_fall() -> None:
    """Up to there the trunk has the rates of a run of the branch's length; one step later it has not."""
    spec = base()
    runs = plan(Ladder.of({**ISOFLOP, "params": [2e6], "flops": [1e14, 3e14, 1e15], "schedule": "wsd"}), spec)
    trunk, *branches = runs
    assert [run.parent for run in runs] == [None, 0, 0] and trunk.fork == 0
    sweep = Sweep(Path(), "scaling", spec.to_dict(), Space(()))
    long = sweep.spec(trunk.overrides).optim
    for run in branches:
        own = sweep.spec(run.overrides).optim
        assert all(learning_rate(own, step) == learning_rate(long, step) for step in range(run.fork))
        assert learning_rate(own, run.fork) < learning_rate(long, run.fork)


@pytest.mark.usefixtures("forked_python")
def test_branches_end_bitwise_as_runs_of_their_own(tmp_path: Path, dataset: Path) -> None:
    """By a driver that is replaced while the trunk waits for its first branch."""
    spec = make_spec(dataset, "cluster.device=cpu", "optim.lr=1e-2", "checkpoint.every=0")
    tokens = [24 * 64.0, 40 * 64.0, 60 * 64.0]
    table = {
        "spec": "x",
        "params": [6e4],
        "tokens": tokens,
        "seq": [16],
        "batch_tokens": 64,
        "lr": 0.01,
        "schedule": "wsd",
    }
    runs = plan(Ladder.of(table), spec)
    sweep = Sweep.create(tmp_path / "ladder", spec.to_dict(), Space(()), "scaling")
    LadderDriver(sweep, runs).start()
    with sweep.driving(), Workers(sweep, 1) as workers:
        workers.wait_for(lambda trials: trials[0].state == "paused")
        driver = LadderDriver(Sweep.open(sweep.path), runs)
        driver.start()
        workers.wait_for(driver.advance)
    assert [trial.state for trial in sweep.trials()] == ["finished"] * 3
    assert [trial.parent for trial in sweep.trials()] == [
        None if run.parent is None else {"trial": 0, "step": run.fork} for run in runs
    ]
    alone = Trainer(sweep.spec(runs[1].overrides), tmp_path / "alone", quiet=True)
    alone.run()
    lines = [json.loads(line) for line in alone.folder.metrics_path.read_text().splitlines()]
    mine = sweep.metrics(1)
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    assert [[line.get(key) for key in keys] for line in mine] == [
        [line.get(key) for key in keys] for line in lines if line["step"] > runs[1].fork
    ]


def test_the_holdout_is_predicted_by_the_others_before_it_is_queued(tmp_path: Path) -> None:
    spec = base()
    asked = Ladder.of({
        **ISOFLOP, "params": [2e6, 4e6, 8e6, 16e6, 32e6], "flops": [1e14, 1e15, 1e16], "tokens_per_param": [0.5, 5000],
        "holdout": {"flops": 1e17},
    })  # fmt: skip
    runs = plan(asked, spec)
    sweep = Sweep.create(tmp_path / "ladder", spec.to_dict(), Space(()), "scaling")
    driver = LadderDriver(sweep, runs)
    driver.start()
    with pytest.raises(Exception, match="none of its"):
        driver.start_holdout(asked, spec, MUCH_TEXT)
    for run in runs:
        end(sweep, run.number, run.steps, truth(run.n, run.d))
    found = driver.start_holdout(asked, spec, MUCH_TEXT)
    assert json.loads((sweep.path / PREDICTION).read_text())["loss"] == found.loss
    assert sweep.trial(found.number).state == "queued" and found.points == len(runs)
    assert found.loss == pytest.approx(truth(found.n, found.d), rel=2e-3) and found.flops == pytest.approx(
        1e17, rel=0.01
    )
    best = fit_law_optimum(sweep, 1e17)
    assert abs(math.log(found.n / best)) < math.log(1.2)
    end(sweep, found.number, 10, 9.0)
    assert driver.start_holdout(asked, spec, MUCH_TEXT) == found  # as it was written
    (sweep.path / PREDICTION).unlink()
    little = found.d // 8  # of which it may see four times as much
    larger = predict_holdout(sweep, asked, spec, little, found.number)
    assert larger.n > found.n and larger.d <= 4 * little


def test_a_holdout_whose_optimum_is_below_all_sizes_has_the_smallest(tmp_path: Path) -> None:
    """Losses that depend on tokens alone: the fewer parameters, the better."""
    spec = base()
    asked = Ladder.of(
        {**ISOFLOP, "flops": [1e14, 1e15, 1e16], "tokens_per_param": [0.5, 5000], "holdout": {"flops": 1e16}}
    )
    runs = plan(asked, spec)
    sweep = Sweep.create(tmp_path / "ladder", spec.to_dict(), Space(()), "scaling")
    driver = LadderDriver(sweep, runs)
    driver.start()
    for run in runs:
        end(sweep, run.number, run.steps, 2 + 2000 / run.d**0.37 + 1e-3 * (run.number % 3))
    assert driver.start_holdout(asked, spec, MUCH_TEXT).n == min(run.n for run in runs)


def test_limits_of_an_undetermined_law_stay_readable() -> None:
    from lmworks.cli.scaling_run import prediction_text

    found = Prediction(8, {}, 53408, 43168, 5201920, 1.6e12, "chinchilla", {}, 8, 1.5572, 1.5546, 4.2914e45, 0.9)
    assert "1.5572 (1.5546 to 4.2914e+45 at 90%), measured 1.5069 (-3.23%)" in prediction_text(found, 1.5069)
    unsure = replace(found, low=None, high=None)
    assert "1.5572 (too few trunks for an interval), measured not finished" in prediction_text(unsure, None)


def truth(n: float, d: float) -> float:
    return float(TRUTH["E"] + TRUTH["A"] / n ** TRUTH["alpha"] + TRUTH["B"] / d ** TRUTH["beta"])


def end(sweep: Sweep, number: int, step: int, loss: float) -> None:
    result = {"step": step, "val_step": step, "val_loss": loss, "loss": loss, "tokens": 0}
    sweep.write(replace(sweep.trial(number), state="finished", step=step, result=result))


def fit_law_optimum(sweep: Sweep, flops: float) -> float:
    from lmworks.scaling.points import read_points

    return float(np.asarray(fit_law(read_points(sweep.path), "chinchilla").fitted.optimum(flops)["n"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flop": [1e15]}, "unknown key 'flop'.*flops"),
        ({"params": []}, "params is missing or empty"),
        ({"params": [2e6, -1]}, "params has -1; it must be a number above 0"),
        ({"params": [2e6, float("inf")]}, "params has inf; it must be a number above 0"),
        ({"params": 2e6}, "params is a list"),
        ({"seq": [64.5]}, "seq has 64.5; it must be a whole number of tokens"),
        ({"min_layers": 4.5}, "min_layers = 4.5 must be a whole number"),
        ({"tokens": [1e7]}, "give flops .* or tokens; both are given"),
        ({"flops": []}, "neither is given"),
        ({"schedule": "linear"}, "schedule = 'linear': give cosine or wsd"),
        ({"holdout": {"flop": 1}}, "holdout is a table with flops"),
        ({"params": [10.0]}, "with a vocabulary of 4096 shapes have"),
        ({"tokens_per_param": [1e6, 1e7]}, "the ladder has no run"),
        ({"params": [4e6], "holdout": {"flops": 1e17}}, "2 runs predict no holdout"),
    ],
)
def test_wrong_ladders_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan(Ladder.of({**ISOFLOP, **change}), base())


def test_a_dry_run_shows_every_run(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ladder.toml").write_text(
        'spec = "tiny"\nparams = [6e4, 1.2e5]\nflops = [1e9, 2e9]\nschedule = "wsd"\nbatch_tokens = 128\n'
    )
    words = ("scaling", "run", "ladder.toml", f"data.path={dataset}", "data.seq=16", "--dry-run")
    found = json.loads(run_cli(capsys, *words, "--json")[1])
    assert len(found["runs"]) == 4 and found["runs"][1]["parent"] == 0 and found["runs"][0]["epochs"] > 0
    whole = sum(run["flops"] for run in found["runs"])
    assert 0.5 * whole < found["flops"] < whole  # branches are cheaper
    assert "4 runs" in run_cli(capsys, *words)[1] and not (tmp_path / "sweeps").exists()
