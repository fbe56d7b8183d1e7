"""Stoppers, on event sequences, against Optuna's pruners where both define the same thing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import optuna
import pytest

from lmworks.tune.early_stop import diverged, fall_per_doubling, reason_to_stop
from lmworks.tune.rungs import rung_steps
from lmworks.tune.stoppers import Asha, MedianStopper, Results, Stopper, best_first, stopper_of

optuna.logging.set_verbosity(optuna.logging.ERROR)


def curves(seed: int, trials: int, steps: tuple[int, ...]) -> Iterator[tuple[int, dict[int, float]]]:
    rng = random.Random(seed)
    for trial in range(trials):
        floor, noise = rng.uniform(2.0, 4.0), rng.uniform(0.0, 0.5)
        yield trial, {step: floor + 5.0 / step + rng.gauss(0, noise) for step in steps}


@pytest.mark.parametrize("seed", range(6))
def test_median_decides_as_optunas_pruner(seed: int) -> None:
    steps = (1, 2, 4, 8, 16)
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=5))
    results, stopper = Results(), MedianStopper(steps)
    stopped = 0
    for number, curve in curves(seed, 40, steps):
        trial = study.ask()
        for step in steps[:-1]:
            trial.report(curve[step], step)
            results.report(number, step, curve[step])
            theirs = trial.should_prune()
            assert (stopper.verdict(results, number) == "stop") == theirs, (number, step)
            if theirs:
                break
        if theirs:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            results.stopped.add(number)
            stopped += 1
        else:
            trial.report(curve[steps[-1]], steps[-1])
            results.report(number, steps[-1], curve[steps[-1]])
            study.tell(trial, curve[steps[-1]])
            results.finished.add(number)
    assert 5 < stopped < 40


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eta", [2, 3, 4])
def test_asha_promotes_what_optunas_successive_halving_lets_pass(seed: int, eta: int) -> None:
    """Optuna judges a trial once, when it arrives; at that moment both compare it with the best 1/η of its rung."""
    study = optuna.create_study(pruner=optuna.pruners.SuccessiveHalvingPruner(1, reduction_factor=eta))
    stopper, results = Asha((1, eta), eta, 100), Results()
    passed = 0
    for number, curve in curves(seed, 60, (1,)):
        trial = study.ask()
        trial.report(curve[1], 1)
        results.report(number, 1, curve[1])
        theirs = not trial.should_prune()
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        if number + 1 < eta:  # Optuna lets the best of fewer than η pass, the paper waits
            continue
        results.finished = set(range(number))  # none of the earlier ones is asked about
        assert (stopper.promotion(results, all_started=False) == number) == theirs
        passed += theirs
    assert 0 < passed < 60


def drive(stopper: Stopper, losses: dict[int, dict[int, float]], trials: int) -> Results:
    """One worker: promotions first, then new trials."""
    results, started = Results(), 0
    while True:
        trial = stopper.promotion(results, all_started=started == trials)
        if trial is None:
            if started == trials:
                return results
            trial, started = started, started + 1
        step = stopper.next_rung(trial, results.latest(trial))
        results.report(trial, step, losses[trial][step])
        if step == stopper.rungs[-1]:
            results.finished.add(trial)


@pytest.mark.parametrize("name", ["asha", "hyperband"])
def test_the_steps_spent_are_those_of_the_table(name: str) -> None:
    """With losses that keep their order, late trials worse: nothing is promoted too early."""
    trials = 27
    stopper = stopper_of(name, trials, 1, 27, 3)
    losses = {trial: {step: trial + 1.0 / step for step in stopper.rungs} for trial in range(trials)}
    results = drive(stopper, losses, trials)
    spent = sum(results.latest(trial) for trial in range(trials))
    assert spent == sum(bracket.steps for bracket in stopper.table())
    assert best_first(results, range(trials))[0] == 0


def test_asha_promotes_from_the_highest_rung_first() -> None:
    stopper, results = Asha((1, 2, 4), 2, 8), Results()
    for trial, loss in enumerate([1.0, 2.0, 3.0, 4.0]):
        results.report(trial, 1, loss)
    for trial, loss in enumerate([1.5, 1.2]):
        results.report(trial, 2, loss)
    assert stopper.promotion(results, all_started=False) == 1  # the best of two at step 2
    results.running.add(1)
    assert stopper.promotion(results, all_started=False) is None  # 0 and 1 have left step 1 already
    results.report(4, 1, 0.5)
    results.report(5, 1, 9.0)
    assert stopper.promotion(results, all_started=False) == 4


def test_a_loss_that_is_not_finite_is_never_promoted() -> None:
    results = Results()
    results.report(0, 1, math.nan)
    results.report(1, 1, math.inf)
    assert Asha((1, 3), 3, 2).promotion(results, all_started=True) is None
    results.report(2, 1, 5.0)
    assert Asha((1, 3), 3, 3).promotion(results, all_started=True) == 2


def test_hyperband_waits_for_its_rung_and_not_for_trials_that_were_stopped() -> None:
    stopper, results = stopper_of("hyperband", 9, 1, 9, 3), Results()
    for trial in range(8):
        results.report(trial, 1, float(trial))
    assert stopper.promotion(results, all_started=True) is None
    results.stopped.add(8)
    assert stopper.promotion(results, all_started=True) == 0
    for trial in (0, 1, 2):
        results.report(trial, 3, float(-trial))
    assert stopper.promotion(results, all_started=True) == 2  # the best at its new rung


# --- rules of one curve ----------------------------------------------------------------------------------


def test_divergence() -> None:
    assert diverged({1: math.inf})
    assert diverged({10: 8.0, 20: 5.0, 30: 8.1})
    assert diverged({10: 8.0, 20: 5.0, 30: 6.6})
    assert not diverged({10: 8.0, 20: 5.0, 30: 5.2})
    assert not diverged({10: 8.0})
    assert not diverged({5: 4.06, 8: 4.36})  # at the end of the warm-up


def test_the_slope_is_that_of_the_loss_over_the_logarithm_of_the_steps() -> None:
    falling = fall_per_doubling({10: 4.0, 20: 3.9, 40: 3.8, 80: 3.7})
    assert falling == pytest.approx(0.1 / 3.7)
    assert fall_per_doubling({10: 4.0, 20: 3.9}) is None


def test_a_trial_that_cannot_win_is_stopped_and_one_that_may_is_not() -> None:
    steps = rung_steps(10, 1280, 2)
    results = Results()
    for trial, floor in enumerate((2.0, 2.1)):
        for step in steps:
            results.report(trial, step, floor + 4.0 * step**-0.5)
        results.finished.add(trial)
    for step in steps[:5]:
        results.report(2, step, 2.5 + 4.0 * step**-0.5)
        results.report(3, step, 1.9 + 4.0 * step**-0.5)
    assert "predicted to end at 2.6" in str(reason_to_stop(["predicted"], results, 2, 1280))
    assert reason_to_stop(["predicted", "divergence", "slope"], results, 3, 1280) is None
