"""Suggestions: those of Optuna's own study, with the same sampler and seed; pauses, refusals, restarts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest

from lmworks.spec.errors import SpecError
from lmworks.sweep.space import Point, Space
from lmworks.tune.storage import storage_of
from lmworks.tune.suggest import Suggestions, check_algorithm, suggest

optuna.logging.set_verbosity(optuna.logging.ERROR)

SPACE = Space.of(
    {
        "optim.lr": {"range": [1e-4, 1e-1], "log": True},
        "optim.warmup": {"range": [0, 100]},
        "optim.beta2": {"range": [0.9, 0.99], "step": 0.01},
        "optim.schedule": {"values": ["cosine", "wsd"]},
        "optim.decay_ratio": {"range": [0.1, 0.5], "when": {"optim.schedule": "wsd"}},
    }
)


def loss(point: Point) -> float:
    return (
        (math.log10(point["optim.lr"]) + 2.5) ** 2
        + point["optim.warmup"] / 200
        + point["optim.beta2"]
        + point.get("optim.decay_ratio", 0.2)
    )


def define_by_run(trial: optuna.Trial) -> float:
    """The same space as an Optuna user would write it."""
    point: Point = {
        "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1e-1, log=True),
        "optim.warmup": trial.suggest_int("optim.warmup", 0, 100),
        "optim.beta2": trial.suggest_float("optim.beta2", 0.9, 0.99, step=0.01),
        "optim.schedule": trial.suggest_categorical("optim.schedule", ["cosine", "wsd"]),
    }
    if point["optim.schedule"] == "wsd":
        point["optim.decay_ratio"] = trial.suggest_float("optim.decay_ratio", 0.1, 0.5)
    return loss(point)


def suggestions(folder: Path, algorithm: str = "tpe", seed: int = 3, **more: Any) -> Suggestions:
    space = more.pop("space", SPACE)
    return Suggestions("s", space, algorithm, seed, str(folder / "optuna.journal"), folder / "sampler.pkl", **more)


@pytest.mark.parametrize(
    ("algorithm", "theirs", "trials"),
    [
        ("random", lambda: optuna.samplers.RandomSampler(seed=3), 12),
        ("sobol", lambda: optuna.samplers.QMCSampler(qmc_type="sobol", scramble=True, seed=3), 12),
        ("tpe", lambda: optuna.samplers.TPESampler(seed=3), 16),
        ("cmaes", lambda: optuna.samplers.CmaEsSampler(seed=3), 12),
        ("gp", lambda: optuna.samplers.GPSampler(seed=3), 12),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_suggestions_are_optunas(tmp_path: Path, algorithm: str, theirs: Any, trials: int) -> None:
    study = optuna.create_study(sampler=theirs())
    study.optimize(define_by_run, n_trials=trials)
    mine = suggestions(tmp_path, algorithm)
    for trial in study.trials:
        asked = mine.ask()
        assert asked.point == trial.params
        mine.finish(asked.number, loss(asked.point))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ["random", "sobol", "tpe", "cmaes"])
def test_a_driver_that_is_started_again_goes_on_with_the_same_suggestions(tmp_path: Path, algorithm: str) -> None:
    whole, parts = [], []
    mine = suggestions(tmp_path / "whole", algorithm)
    for _ in range(14):
        asked = mine.ask()
        mine.finish(asked.number, loss(asked.point))
        whole.append(asked.point)
    for _ in range(14):
        mine = suggestions(tmp_path / "parts", algorithm)
        asked = mine.ask()
        mine.finish(asked.number, loss(asked.point))
        parts.append(asked.point)
    assert parts == whole


def test_a_trial_that_was_asked_for_as_the_driver_was_killed_is_not_lost(tmp_path: Path) -> None:
    mine = suggestions(tmp_path, "random")
    mine.finish(mine.ask().number, 1.0)
    before = (tmp_path / "sampler.pkl").read_bytes()
    lost = mine.ask()
    again = suggestions(tmp_path, "random")
    assert again.unused([0]) == [lost]  # killed after the state was saved
    (tmp_path / "sampler.pkl").write_bytes(before)  # killed before
    again = suggestions(tmp_path, "random")
    assert again.unused([0]) == []
    assert again.ask().point == lost.point


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("algorithm", "sampler", "whole"),
    [
        ("tpe", optuna.samplers.TPESampler, 4),
        ("gp", optuna.samplers.GPSampler, 2),
        ("cmaes", optuna.samplers.CmaEsSampler, 2),
    ],
)
def test_samplers_learn_from_paused_trials_what_they_learn_from_pruned_ones(
    tmp_path: Path, algorithm: str, sampler: Any, whole: int
) -> None:
    """As under ASHA: every second or fourth trial ends, the others pause at their first rung. Against a study of
    Optuna's in which they are pruned there."""
    study = optuna.create_study(sampler=sampler(seed=3))
    mine = suggestions(tmp_path, algorithm)
    for number in range(20):
        theirs, asked = study.ask(), mine.ask()
        point = suggest(theirs, SPACE)
        assert asked.point == point
        theirs.report(loss(point) + 1.0, 10)
        mine.report(asked.number, 10, loss(point) + 1.0)
        if number % whole == 0:
            study.tell(theirs, loss(point))
            mine.finish(asked.number, loss(point))
        else:
            study.tell(theirs, state=optuna.trial.TrialState.PRUNED)
            mine.pause(asked.number)
    after = [suggest(study.ask(), SPACE) for _ in range(2)]
    assert [mine.ask().point for _ in range(2)] == after


def test_a_grid_is_every_point_of_the_space(tmp_path: Path) -> None:
    space = Space.of({"optim.lr": {"values": [1e-3, 3e-3]}, "optim.clip": {"range": [0.5, 1.5], "points": 3}})
    mine = suggestions(tmp_path, "grid", space=space)
    asked = [mine.ask().point for _ in range(6)]
    assert asked == space.points()


def test_a_refused_point_is_the_worst_that_the_sampler_knows(tmp_path: Path) -> None:
    """Where all rates above 1e-2 are refused, TPE asks for fewer of them than random sampling does."""
    space = Space.of({"optim.lr": {"range": [1e-4, 1.0], "log": True}})

    def above(algorithm: str) -> int:
        mine = suggestions(tmp_path / algorithm, algorithm, space=space)
        count = 0
        for _ in range(60):
            asked = mine.ask()
            if asked.point["optim.lr"] > 1e-2:
                mine.refuse(asked.number, "too dear")
                count += 1
            else:
                mine.finish(asked.number, 1.0 + asked.point["optim.lr"])
        assert len(mine.refused()) == count
        return count

    assert above("tpe") < above("random") * 0.7


@pytest.mark.parametrize("where", ["postgresql://nobody@127.0.0.1:1/none", "mongo://x", "sqlite:////nowhere/at/all.db"])
def test_a_wrong_storage_is_one_line(where: str) -> None:
    with pytest.raises(SpecError, match="--storage") as raised:
        storage_of(where)
    assert "\n" not in str(raised.value)


def test_a_database_keeps_the_same_study(tmp_path: Path) -> None:
    """SQLite beside the journal: the same suggestions, and another process finds them."""
    url = f"sqlite:///{tmp_path / 'tune.db'}"
    journal = suggestions(tmp_path / "j")
    found = []
    for _ in range(3):
        mine = Suggestions("s", SPACE, "tpe", 3, url, tmp_path / "sampler.pkl")
        asked = mine.ask()
        mine.report(asked.number, 5, 4.0)
        mine.finish(asked.number, loss(asked.point))
        found.append(asked.point)
        there = journal.ask()
        journal.finish(there.number, loss(there.point))
        assert there.point == asked.point
    assert [trial.params for trial in optuna.load_study(study_name="s", storage=url).trials] == found


def test_an_unknown_algorithm_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'cmaes'"):
        check_algorithm("cma")
