"""The driver, with trials whose losses are a formula: no process is started."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import formula_trials
import optuna
import pytest
from formula_trials import STEPS, FormulaWorkers, Killed, driver

from lmworks.plan.predict import predict
from lmworks.spec import RunSpec
from lmworks.spec.errors import LMWorksError
from lmworks.spec.schema import merge
from lmworks.sweep.folder import Sweep, base_of
from lmworks.sweep.space import Point, Space
from lmworks.tune.constraints import Constraints
from lmworks.tune.driver import Driver
from lmworks.tune.stoppers import stopper_of
from lmworks.tune.storage import IN_MEMORY
from lmworks.tune.suggest import Suggestions


def summary(sweep: Sweep) -> list[tuple[Point, str, int]]:
    return [(trial.overrides, trial.state, trial.step) for trial in sweep.trials()]


@pytest.mark.parametrize("stopper", ["none", "median", "asha", "hyperband"])
def test_a_driver_that_is_killed_again_and_again_ends_where_one_does_that_is_not(tmp_path: Path, stopper: str) -> None:
    whole = driver(tmp_path / "whole", stopper)
    first = FormulaWorkers(whole.sweep)
    whole.run(first)
    ran: list[tuple[int, int]] = []
    for _ in range(200):
        part = driver(tmp_path / "parts", stopper)
        workers = FormulaWorkers(part.sweep, kill_after=4)
        try:
            part.run(workers)
        except Killed:
            ran += workers.ran
            continue
        ran += workers.ran
        break
    assert ran == first.ran
    assert summary(part.sweep) == summary(whole.sweep)


def test_asha_with_tpe_spends_its_steps_on_the_best(tmp_path: Path) -> None:
    tuner = driver(tmp_path, trials=18)
    workers = FormulaWorkers(tuner.sweep)
    tuner.run(workers)
    reached = [trial.step for trial in tuner.sweep.trials()]
    assert sum(step >= 10 for step in reached) == 18
    assert 4 <= sum(step >= 30 for step in reached) <= 9
    assert 1 <= sum(step == 90 for step in reached) <= 4
    best = min(tuner.results.finished, key=lambda trial: tuner.results.losses[trial][90])
    assert abs(math.log10(tuner.sweep.trial(best).overrides["optim.lr"]) + 2) < 0.5


def test_a_trial_that_diverges_is_stopped_and_says_why(tmp_path: Path) -> None:
    tuner = driver(tmp_path, "none", trials=25, algorithm="random")
    tuner.run(FormulaWorkers(tuner.sweep))
    wild = [trial for trial in tuner.sweep.trials() if trial.overrides["optim.lr"] > 0.1]
    assert wild
    assert all(trial.state == "stopped" and trial.step == 10 for trial in wild)
    assert wild[0].notes["stopped"] == "diverged: loss inf at step 10"
    assert {trial.state for trial in tuner.sweep.trials() if trial not in wild} == {"finished"}


def test_points_that_do_not_fit_are_refused_before_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.tune.driver.MOST_REFUSED", 10)
    tuner = driver(tmp_path, "none", trials=3, algorithm="random", constraints=Constraints(memory_bytes=1.0))
    with pytest.raises(LMWorksError, match="points in a row were refused, the last one because it needs"):
        tuner.run(FormulaWorkers(tuner.sweep))
    assert not tuner.sweep.trials()
    assert len(tuner.suggestions.refused()) == 10


def test_more_trials_go_on_with_those_that_are_there(tmp_path: Path) -> None:
    tuner = driver(tmp_path, trials=6)
    tuner.run(FormulaWorkers(tuner.sweep))
    before = summary(tuner.sweep)
    more = driver(tmp_path, trials=9)
    workers = FormulaWorkers(more.sweep)
    more.run(workers)
    assert [point for point, _, _ in summary(more.sweep)][:6] == [point for point, _, _ in before]
    assert {number for number, _ in workers.ran} >= {6, 7, 8}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("algorithm", "sampler", "trials"),
    [
        ("tpe", optuna.samplers.TPESampler, 24),
        pytest.param("gp", optuna.samplers.GPSampler, 26, marks=pytest.mark.slow),
        ("cmaes", optuna.samplers.CmaEsSampler, 24),
    ],
)
def test_a_search_with_the_median_stopper_is_optunas_own_with_its_median_pruner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, sampler: Any, trials: int
) -> None:
    """The same points, and the same trials stopped at the same rungs: TPE learns from stopped trials, GP and CMA-ES
    from finished ones alone, as Optuna has it."""

    def losses(point: Point, step: int) -> float:
        """Early ones say little: a search that stops nearly all but the first five never begins to learn by GP."""
        wobble = math.sin(100 * point["optim.clip"]) if step < STEPS else 0.1 * point["optim.clip"]
        return 2.0 + 0.1 * (math.log10(point["optim.lr"]) + 2) ** 2 + 5.0 / step + wobble

    def objective(trial: optuna.Trial) -> float:
        point = {
            "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1.0, log=True),
            "optim.clip": trial.suggest_float("optim.clip", 0.1, 2.0),
        }
        for step in (10, 30):
            trial.report(losses(point, step), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return losses(point, STEPS)

    study = optuna.create_study(sampler=sampler(seed=1), pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, n_trials=trials)
    monkeypatch.setattr(formula_trials, "formula", losses)
    tuner = driver(tmp_path, "median", trials, algorithm)
    tuner.run(FormulaWorkers(tuner.sweep))
    theirs = [
        (one.params, max(one.intermediate_values) if one.state.name == "PRUNED" else STEPS) for one in study.trials
    ]
    assert [(one.overrides, one.step) for one in tuner.sweep.trials()] == theirs
    stopped = sum(step < STEPS for _, step in theirs)
    assert stopped >= 4 and trials - stopped > 10  # GP begins after ten


def test_a_grid_ends_where_its_last_points_are_refused(tmp_path: Path) -> None:
    """Nothing is asked of the sampler in their place, which would repeat points."""
    space = Space.of({"model.layers": {"values": [1, 2, 3, 4]}})
    base = base_of("configs/tiny.toml", [f"optim.steps={STEPS}"])
    for limit, expected in ((memory_of(base, 2), [1, 2]), (1.0, None)):
        sweep = Sweep.create(tmp_path / str(limit), base, space, kind="tune")
        suggestions = Suggestions("s", space, "grid", 0, IN_MEMORY, None)
        stopper = stopper_of("none", 9, 10, STEPS, 3)
        tuner = Driver(sweep, suggestions, stopper, 9, constraints=Constraints(memory_bytes=limit), grid=True)
        if expected is None:
            with pytest.raises(
                LMWorksError, match="every point of the grid was refused, the last one because it needs"
            ):
                tuner.run(LayerWorkers(sweep))
        else:
            tuner.run(LayerWorkers(sweep))
            assert [trial.overrides["model.layers"] for trial in sweep.trials()] == expected
            assert [point["model.layers"] for point, _ in suggestions.refused()] == [3, 4]


class LayerWorkers(FormulaWorkers):
    def loss(self, point: Point, step: int) -> float:
        return 1.0 / point["model.layers"]


def memory_of(base: dict[str, Any], layers: int) -> float:
    return float(predict(RunSpec.from_dict(merge(base, {"model": {"layers": layers}})), None).memory.total)
