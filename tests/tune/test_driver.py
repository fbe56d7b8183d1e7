"""The driver, with trials whose losses are a formula: no process is started."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from formula_trials import FormulaWorkers, Killed, driver

from lmworks.spec.errors import LMWorksError
from lmworks.sweep.folder import Sweep
from lmworks.sweep.space import Point
from lmworks.tune.constraints import Constraints


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
