"""Suggestions: Optuna's samplers over a space, in one of Optuna's storages.

A study asks its sampler exactly as `optuna.Study` does, so the same sampler with the same seed suggests the same
trials. Two things are added. A paused trial, which Optuna has no state for, is a pruned one to the sampler: TPE learns
from the loss it has, GP and CMA-ES from complete trials alone. And the sampler is saved after each suggestion: a driver
that is started again goes on in the same sequence of random numbers.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec.errors import LMWorksError, SpecError, did_you_mean
from ..sweep.space import Dimension, Point, Space
from .storage import import_optuna, open_study, storage_of

if TYPE_CHECKING:
    import optuna

ALGORITHMS = ("grid", "random", "sobol", "tpe", "gp", "cmaes")
POPULATION = ("pbt", "pb2")
PAUSED = "lmworks_paused"  # user attributes of Optuna's trials
REFUSED = "lmworks_refused"


def check_algorithm(name: str) -> None:
    if name not in (*ALGORITHMS, *POPULATION):
        raise SpecError(f"unknown --algorithm '{name}'{did_you_mean(name, (*ALGORITHMS, *POPULATION))}")


def sampler_of(algorithm: str, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's own, with its defaults. A grid needs none: its points are queued."""
    samplers = import_optuna().samplers
    try:
        if algorithm == "sobol":
            return samplers.QMCSampler(qmc_type="sobol", scramble=True, seed=seed, warn_independent_sampling=False)
        if algorithm == "tpe":
            return samplers.TPESampler(seed=seed)
        if algorithm == "gp":
            return samplers.GPSampler(seed=seed)
        if algorithm == "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        return samplers.RandomSampler(seed=seed)
    except ImportError as error:
        raise SpecError(f'--algorithm {algorithm}: {error.name} is missing: pip install "lmworks[tune]"') from None


def suggest(trial: optuna.Trial, space: Space) -> Point:
    """A value for each key whose condition holds."""
    point: Point = {}
    for dimension in space.dimensions:
        if dimension.is_active(point):
            point[dimension.key] = suggest_value(trial, dimension)
    return point


def suggest_value(trial: optuna.Trial, dimension: Dimension) -> Any:
    if dimension.range is None:
        return trial.suggest_categorical(dimension.key, dimension.values)
    low, high = dimension.range
    if dimension.integer:
        step = 1 if dimension.step is None else int(dimension.step)
        return trial.suggest_int(dimension.key, int(low), int(high), step=step, log=dimension.log)
    return trial.suggest_float(dimension.key, low, high, step=dimension.step, log=dimension.log)


@dataclass(frozen=True)
class Suggestion:
    number: int  # Optuna's
    point: Point


class Suggestions:
    """The Optuna study of a sweep. Numbers are Optuna's: refused points count there, and are no trials of the sweep."""

    def __init__(
        self, name: str, space: Space, algorithm: str, seed: int, storage: str, state: Path | None, owner: str = ""
    ) -> None:
        """`state`: the file that the sampler is saved in, for drivers that may be killed. `owner`: the sweep, in a
        storage that has studies of others."""
        optuna = import_optuna()
        self.space, self.state, self.states = space, state, optuna.trial.TrialState
        self.asked, sampler = read_sampler(state) if state else (0, None)
        store = storage_of(storage)
        open_study(store, name, owner, storage)
        sampler = sampler or sampler_of(algorithm, seed)
        self.study: Any = paused_counts(optuna)(study_name=name, storage=store, sampler=sampler)
        if algorithm == "grid" and not self.study.get_trials(deepcopy=False):
            for point in space.points():
                self.study.enqueue_trial(point)

    def ask(self) -> Suggestion:
        trial = self.study.ask()
        point = suggest(trial, self.space)
        self.asked = trial.number + 1
        if self.state:
            write_sampler(self.state, self.asked, self.study.sampler)
        return Suggestion(trial.number, point)

    def unused(self, known: Collection[int]) -> list[Suggestion]:
        """What a killed driver asked for and did not start; `known`: numbers that are trials of the sweep. A suggestion
        after which the sampler was not saved is dropped: the sampler repeats it."""
        found = []
        for trial in self.study.get_trials(deepcopy=False, states=[self.states.RUNNING]):
            queued = trial.system_attrs.get("fixed_params")  # a point of a grid
            if trial.number in known:
                continue
            if queued or trial.number < self.asked:
                found.append(Suggestion(trial.number, queued or trial.params))
            else:
                self.study.tell(trial.number, state=self.states.FAIL)
        return found

    def exhausted(self) -> bool:
        """Whether a grid has no point left."""
        waiting = self.study.get_trials(deepcopy=False, states=[self.states.WAITING])
        return not waiting

    def refuse(self, number: int, why: str) -> None:
        """A constraint does not hold. A pruned trial without a loss is the worst that TPE knows."""
        self.set_attr(number, REFUSED, why)
        self.study.tell(number, state=self.states.PRUNED)

    def report(self, number: int, step: int, loss: float) -> None:
        frozen = self.frozen(number)
        if step not in frozen.intermediate_values:
            self.study._storage.set_trial_intermediate_value(frozen._trial_id, step, loss)

    def pause(self, number: int, paused: bool = True) -> None:
        self.set_attr(number, PAUSED, paused)

    def finish(self, number: int, loss: float) -> None:
        self.study.tell(number, loss, skip_if_finished=True)

    def stop(self, number: int) -> None:
        self.study.tell(number, state=self.states.PRUNED, skip_if_finished=True)

    def fail(self, number: int) -> None:
        self.study.tell(number, state=self.states.FAIL, skip_if_finished=True)

    def set_attr(self, number: int, name: str, value: Any) -> None:
        self.study._storage.set_trial_user_attr(self.frozen(number)._trial_id, name, value)

    def frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def refused(self) -> list[tuple[Point, str]]:
        trials = self.study.get_trials(deepcopy=False)
        return [(dict(trial.params), trial.user_attrs[REFUSED]) for trial in trials if REFUSED in trial.user_attrs]


def paused_counts(optuna: Any) -> Any:
    class PausedCounts(optuna.Study):
        """Samplers see a paused trial as a pruned one: with the loss of its last rung."""

        def _get_trials(self, deepcopy: bool = True, states: Any = None, use_cache: bool = False) -> list[Any]:
            trials = [as_pruned(optuna, trial) for trial in super()._get_trials(deepcopy, None, use_cache)]
            return [trial for trial in trials if states is None or trial.state in states]

        def get_trials(self, deepcopy: bool = True, states: Any = None) -> list[Any]:
            return super()._get_trials(deepcopy, states, use_cache=False)

    return PausedCounts


def as_pruned(optuna: Any, trial: Any) -> Any:
    if trial.state != optuna.trial.TrialState.RUNNING or not trial.user_attrs.get(PAUSED):
        return trial
    return optuna.trial.FrozenTrial(
        number=trial.number,
        state=optuna.trial.TrialState.PRUNED,
        value=None,
        datetime_start=trial.datetime_start,
        datetime_complete=trial.datetime_start,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=trial.user_attrs,
        system_attrs=trial.system_attrs,
        intermediate_values=trial.intermediate_values,
        trial_id=trial._trial_id,
    )


# --- the sampler's state ---------------------------------------------------------------------------------


def read_sampler(path: Path) -> tuple[int, Any]:
    """(trials asked so far, the sampler); (0, None) where there is none yet."""
    if not path.exists():
        return 0, None
    try:
        with path.open("rb") as file:
            asked, sampler = pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, ValueError) as error:
        raise LMWorksError(f"the state of the sampler, {path}, cannot be read: {error}") from None
    return asked, sampler


def write_sampler(path: Path, asked: int, sampler: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        pickle.dump((asked, sampler), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
