"""Population-based training: who gives up, what is explored, and a population whose losses are a formula."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from formula_trials import SPACE, STEPS, FormulaWorkers, Killed

from lmworks.spec.errors import SpecError
from lmworks.sweep.folder import Sweep, base_of
from lmworks.sweep.space import Space
from lmworks.tune.bandit import Interval, Kernel, Posterior, choose, fitted, ucb
from lmworks.tune.population import explore, quantiles
from lmworks.tune.population_driver import PopulationDriver


def test_the_worst_quarter_takes_from_the_best() -> None:
    losses = {member: float(loss) for member, loss in enumerate([3, 1, 4, 1.5, 9, 2, 6, 5])}
    assert quantiles(losses) == ([4, 6], [1, 3])
    assert quantiles({0: 1.0, 1: math.inf, 2: math.inf, 3: 2.0, 4: 3.0}) == ([2, 1], [0, 3])
    assert quantiles({0: 1.0}) == ([], [])


def test_explored_keys_stay_near_their_parent_or_are_drawn_anew() -> None:
    space = Space.of(
        {
            "optim.lr": {"range": [1e-4, 1e-1], "log": True},
            "optim.warmup": {"range": [0, 50]},
            "optim.schedule": {"values": ["cosine", "linear", "constant"]},
        }
    )
    parent = {"optim.lr": 1e-2, "optim.warmup": 40, "optim.schedule": "linear"}
    found = [explore(space, parent, random.Random(seed)) for seed in range(400)]
    rates = [point["optim.lr"] for point in found]
    near = [rate for rate in rates if math.isclose(rate, 1.2e-2) or math.isclose(rate, 0.8e-2)]
    assert 0.68 < len(near) / 400 < 0.82  # the rest is drawn anew
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    assert {point["optim.warmup"] for point in found} >= {48, 32}
    assert {point["optim.schedule"] for point in found} == {"cosine", "linear", "constant"}


# --- the bandit ------------------------------------------------------------------------------------------


def test_the_posterior_goes_through_its_data() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (12, 4)), rng.standard_normal(12)
    model = Posterior.of(Kernel(1.0, 0.3, 0.1), x, y)
    assert np.allclose(model.mean(x), y, atol=1e-4)
    assert np.allclose(model.variance(x), 0.0, atol=1e-6)
    assert model.variance(np.full((1, 4), 30.0))[0] == pytest.approx(1.0)


def test_the_bandit_finds_the_keys_that_gained_most() -> None:
    """Gains are highest at a learning rate of 1e-2, whatever the time."""
    space = Space.of({"optim.lr": {"range": [1e-4, 1.0], "log": True}})
    rng = random.Random(1)
    history = []
    for time in (10, 20, 30):
        for _ in range(8):
            lr = 10 ** rng.uniform(-4, 0)
            history.append(Interval(time, -3.0, 1.0 - (math.log10(lr) + 2) ** 2, {"optim.lr": lr}))
    chosen = choose(space, history, 30, -3.0, [], seed=0)
    assert chosen is not None
    assert abs(math.log10(chosen["optim.lr"]) + 2) < 0.7
    assert choose(space, [], 10, -3.0, [], seed=0) is None


def test_points_of_the_same_round_are_kept_apart() -> None:
    """Their gains are not known yet; the variance, and with it the bound, falls where they are and nowhere else."""
    x, pending, far = np.array([[0.0, 0.0, 0.2]]), np.array([[1.0, 0.5, 0.8]]), np.array([[1.0, 0.5, 0.1]])
    model = Posterior.of(Kernel(1.0, 0.05, 0.1), x, np.zeros(1))
    both = Posterior.of(Kernel(1.0, 0.05, 0.1), np.vstack([x, pending]), np.zeros(2))
    assert ucb(model, both, pending)[0] < 0.01 < ucb(model, model, pending)[0]
    assert ucb(model, both, far)[0] == pytest.approx(ucb(model, model, far)[0], abs=1e-3)


@pytest.mark.ray
def test_the_bandit_is_that_of_ray_tune() -> None:
    """Kernel, posterior and UCB at the same hyper-parameters; and what ours takes for the optimum is no worse."""
    from ray.tune.schedulers import pb2_utils as utils
    from sklearn.gaussian_process import GaussianProcessRegressor

    rng = np.random.default_rng(3)
    x, at = rng.uniform(0, 1, (20, 4)), rng.uniform(0, 1, (5, 4))
    y = utils.standardize(np.sin(4 * x[:, 2]) - x[:, 3] + 0.1 * rng.standard_normal(20))
    theirs = GaussianProcessRegressor(kernel=utils.TV_SquaredExp(1.3, 0.4, 0.2), optimizer=None, alpha=1e-10).fit(x, y)
    mine = Posterior.of(Kernel(1.3, 0.4, 0.2), x, y)
    assert np.allclose(mine.kernel(x, at), theirs.kernel_(x, at))
    mean, std = theirs.predict(at, return_std=True)
    assert np.allclose(mine.mean(at), mean, atol=1e-5)
    assert np.allclose(mine.variance(at), std**2, atol=1e-5)
    expected = [utils.UCB(theirs, theirs, row[2:], row[:2]) for row in at]
    assert np.allclose(ucb(mine, mine, at), expected, atol=1e-4)
    assert mine.log_likelihood(y) == pytest.approx(theirs.log_marginal_likelihood(theirs.kernel_.theta), rel=1e-5)
    optimised = GaussianProcessRegressor(kernel=utils.TV_SquaredExp(), optimizer="fmin_l_bfgs_b", alpha=1e-10)
    optimised.fit(x, y)
    assert fitted(x, y).log_likelihood(y) >= optimised.log_marginal_likelihood_value_ - 1e-2


# --- the driver ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forks_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a formula have no checkpoints."""
    monkeypatch.setattr("lmworks.sweep.folder.fork_run", lambda *_: None)


def population(folder: Path, algorithm: str = "pbt", space: Space = SPACE) -> PopulationDriver:
    folder.mkdir(parents=True, exist_ok=True)
    base = base_of("configs/tiny.toml", [f"optim.steps={STEPS}"])
    sweep = Sweep.create(folder / "p", base, space, kind="tune", seed=4)
    return PopulationDriver(sweep, algorithm, 8, 15, STEPS)


@pytest.mark.parametrize("algorithm", ["pbt", "pb2"])
def test_a_population_keeps_its_size_and_its_lineage(tmp_path: Path, algorithm: str) -> None:
    driver = population(tmp_path, algorithm)
    driver.run(FormulaWorkers(driver.sweep, every=15))
    trials = driver.sweep.trials()
    assert sum(trial.state == "finished" for trial in trials) == 8
    forks = [trial for trial in trials if trial.parent]
    assert 10 <= len(forks) <= 16  # two of eight after each of five exchanges, and those that diverge at first
    for trial in forks:
        parent = driver.sweep.trial(trial.parent["trial"])
        assert parent.step >= trial.parent["step"]
        assert trial.overrides["seed"] != parent.overrides["seed"]  # its own order of the data
    last = driver.current(99)
    assert {trial.overrides["seed"] for trial in last.values()} == set(range(8))
    rates = [abs(math.log10(trial.overrides["optim.lr"]) + 2) for trial in last.values()]
    before = [abs(math.log10(trial.overrides["optim.lr"]) + 2) for trial in trials[:8]]
    assert sum(rates) < sum(before)  # nearer to the best rate


def test_a_population_whose_driver_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    whole = population(tmp_path / "whole")
    whole.run(FormulaWorkers(whole.sweep, every=15))
    for _ in range(200):
        part = population(tmp_path / "part")
        try:
            part.run(FormulaWorkers(part.sweep, kill_after=29, every=15))
            break
        except Killed:
            continue
    expected, found = ([(t.overrides, t.state, t.step, t.parent) for t in d.sweep.trials()] for d in (whole, part))
    assert found == expected


def test_keys_that_a_run_cannot_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"a run cannot change model\.layers"):
        population(tmp_path, space=Space.of({"model.layers": {"values": [1, 2, 3]}})).check()
    with pytest.raises(SpecError, match="pb2 needs ranges"):
        population(tmp_path / "b", "pb2", Space.of({"optim.schedule": {"values": ["cosine", "wsd"]}})).check()
