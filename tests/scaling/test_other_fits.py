"""Iso-FLOP parabolas, metrics of loss, laws of learning rate and batch: planted truths, and what each warns of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import TRUTH, branches, ladder, planted

from lmworks.scaling.bootstrap import correction, row_weights
from lmworks.scaling.downstream import fit_downstream, metric
from lmworks.scaling.fitting import fit_law
from lmworks.scaling.hyperparameter_laws import fit_hyperparameter_law
from lmworks.scaling.isoflop import fit_isoflop
from lmworks.scaling.points import Points, read_points
from lmworks.scaling.results import isoflop_result
from lmworks.spec import SpecError

DATA = Path(__file__).parents[2] / "validation" / "scaling"
A = TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])  # N* ∝ C^a of the planted law


def test_parabolas_near_the_minimum_give_the_exponent() -> None:
    found = fit_isoflop(ladder(0.0, 0, wide=2.0))
    assert found.a == pytest.approx(A, abs=0.005)
    assert len(found.budgets) == 5
    low, high = np.quantile(fit_isoflop(ladder(0.001, 0, wide=2.0)).draws[:, 1], [0.05, 0.95])
    assert low < A < high


def test_the_bias_of_lopsided_sizes_is_computed_and_said() -> None:
    """Sizes from half the optimum to sixteen times it: no noise, yet the parabola misses the minimum."""
    flops = np.repeat([1e18, 1e19, 1e20], 7)
    n = 0.1 * np.sqrt(flops) * np.tile(np.geomspace(0.5, 16, 7), 3)
    found = fit_isoflop(planted(n, flops / 6 / n, 0.0, 0))
    assert found.bias is not None
    truth = fit_law(found.points, "chinchilla", replicates=0).fitted.optimum(1e20)["n"]
    assert found.bias["n"] == pytest.approx(found.optimum(1e20)["n"] / truth - 1, abs=1e-3)
    assert abs(found.bias["n"]) > 0.05
    assert any("parabolas are biased at these sizes" in warning for warning in found.warnings)


def test_budgets_without_a_minimum_are_left_out() -> None:
    points = ladder(0.0, 0)
    small = points.take(points.need("n", "") < 0.06 * np.sqrt(points.need("flops", "")))
    with pytest.raises(SpecError, match="0 iso-FLOP budgets have 3 sizes and a minimum between them"):
        fit_isoflop(small)


def test_a_metric_of_loss_comes_back() -> None:
    points = ladder(0.0, 0)
    truth = np.array([0.85, 2.08, 0.756])  # Gadre et al.'s C4 fit of 17 tasks is of this size
    scores = metric(truth, points.loss)
    scored = replace(points, columns={"error": [str(score) for score in scores]})
    found = fit_downstream(scored, "error")
    assert [found.epsilon, found.k, found.gamma] == pytest.approx(truth.tolist(), rel=0.03)
    [at] = [found.at(2.0, np.full(200, 2.0))]
    assert at["value"] == pytest.approx(float(metric(truth, 2.0)), abs=2e-3)
    assert at["interval"] == pytest.approx([at["value"]] * 2, abs=5e-3)
    assert found.rms < 1e-4


def test_the_learning_rate_of_a_power_law_comes_back() -> None:
    """lr* = 1.79·N^−0.713·D^0.307 (Li et al. 2025) with a parabola of loss around it."""
    rows = []
    for n in (1e7, 3e7, 1e8, 3e8):
        for d in (1e9, 4e9, 1.6e10):
            best = 1.79 * n**-0.713 * d**0.307
            rows += [(n, d, lr, 3 + 0.05 * np.log(lr / best) ** 2) for lr in best * np.array([0.3, 0.6, 1.1, 2.0, 4.0])]
    n, d, lr, loss = (np.array(column) for column in zip(*rows, strict=True))
    points = Points("made", loss, n, d, 6 * n * d, columns={"lr": [str(value) for value in lr]})
    found = fit_hyperparameter_law(points, "lr")
    assert found.params == pytest.approx({"c": 1.79, "n_exponent": -0.713, "d_exponent": 0.307}, rel=1e-6)
    assert found.at(1e9, 2e10)["lr"] == pytest.approx(1.79 * 1e9**-0.713 * 2e10**0.307, rel=1e-6)
    assert found.holdout_error == pytest.approx(0, abs=1e-9)
    edge = points.take(np.array([value < 1.5 * np.median(lr) for value in lr]))
    assert any("at the edge of what was tried" in warning for warning in fit_hyperparameter_law(edge, "lr").warnings)
    tuned = points.take(np.arange(len(lr)) % 5 == 2)  # one run a pair, at 1.1 times the best rate
    found = fit_hyperparameter_law(tuned, "lr")
    assert found.params["c"] == pytest.approx(1.1 * 1.79, rel=1e-6)
    assert found.warnings == ("12 of 12 pairs of n and d have one lr: it is taken as tuned already",)


def test_runs_of_one_learning_rate_give_no_law_of_it() -> None:
    points = replace(ladder(0.0, 0), columns={"lr": ["0.004"] * len(ladder(0.0, 0))})
    with pytest.raises(SpecError, match=r"all runs have lr = 0\.004; runs with others give a law of it"):
        fit_hyperparameter_law(points, "lr")


def test_whole_trunks_are_weighted_together_and_few_of_them_say_so() -> None:
    trunk = np.repeat(np.arange(4), 3)
    weights = row_weights(12, 50, 0, trunk)
    assert (weights.reshape(50, 4, 3) == weights.reshape(50, 4, 3)[:, :, :1]).all()
    assert correction(12, 5, 1.0, trunk) > correction(12, 5) > correction(12, 5, 0.2) > 1
    fit = fit_law(branches(0.003, 0, 0.5, trunks=4), "chinchilla", replicates=20)
    assert any(warning.startswith("4 trunks") for warning in fit.warnings)


def test_correlated_branches_have_wider_intervals_than_independent_runs() -> None:
    points = branches(0.003, 2, 0.8)
    together = fit_law(points, "chinchilla", replicates=100, hold_out=False).fitted.interval["alpha"]
    alone = fit_law(replace(points, trunk=None), "chinchilla", replicates=100, hold_out=False).fitted.interval["alpha"]
    assert together[1] - together[0] > 1.2 * (alone[1] - alone[0])


def test_one_ratio_of_tokens_cannot_tell_the_terms_apart() -> None:
    n = np.geomspace(1e7, 1e9, 12)
    points = Points("made", 2 + 100 / n**0.3, n, 20 * n, 120 * n**2)
    assert any("tokens a parameter" in warning for warning in fit_law(points, "chinchilla", replicates=0).warnings)


def test_the_largest_budget_is_predicted_from_the_others() -> None:
    held = fit_law(ladder(0.0, 0), "chinchilla", replicates=0).holdout
    assert held is not None and held["rows"] == 7
    assert held["error"] == pytest.approx(0, abs=1e-4)
    off = ladder(0.0, 0)
    raised = replace(off, loss=np.where(off.need("flops", "") > 9e19, 1.02 * off.loss, off.loss))
    again = fit_law(raised, "chinchilla", replicates=0).holdout
    assert again is not None and again["bias"] == pytest.approx(1 / 1.02 - 1, rel=0.01)


def test_both_conventions_of_parameters() -> None:
    total, bare = (
        fit_law(
            read_points(
                DATA / "gadre_runs.csv", target="eval_data_c4_val", conditions=["train_set=rpj"], convention=how
            ),
            "tied",
            replicates=0,
        )
        for how in ("total", "no-embed")
    )
    assert any("embeddings are up to 46% of the parameters" in warning for warning in total.warnings)
    assert total.fitted.params["alpha"] > bare.fitted.params["alpha"]


def test_an_iso_flop_optimum_outside_the_data_is_said() -> None:
    found = fit_isoflop(ladder(0.001, 0), replicates=10)
    far = isoflop_result(found, found.optimum(1e24))["warnings"]
    assert [warning for warning in far if "1e+24 FLOPs, the runs have 1e+18 to 1e+20" in warning]
    assert not [warning for warning in isoflop_result(found, found.optimum(1e20))["warnings"] if "outside" in warning]


@pytest.mark.parametrize("law", ["chinchilla", "tied", "kaplan", "compute"])
def test_a_loss_that_does_not_fall_is_said(law: str) -> None:
    points = ladder(0.0, 0)
    rising = replace(points, loss=3 + 0.01 * np.arange(len(points)))
    assert any("does not fall" in warning for warning in fit_law(rising, law, replicates=0).warnings)
    assert not any("does not fall" in warning for warning in fit_law(points, law, replicates=0).warnings)


def test_copies_of_rows_are_said() -> None:
    points = ladder(0.001, 0)
    twice = points.take(np.r_[np.arange(len(points)), 0, 1, 2])
    assert any(
        warning.startswith("3 rows have the n, d") for warning in fit_law(twice, "chinchilla", replicates=0).warnings
    )
    assert not any("rows have" in warning for warning in fit_law(points, "chinchilla", replicates=0).warnings)


def test_iso_flop_optima_go_by_the_flops_of_the_runs() -> None:
    """A token of 20·N^0.9 FLOPs, as small models with attention and a head have: D* and both exponents follow it."""
    flops = np.repeat([1e18, 3e18, 1e19, 3e19, 1e20], 7)
    a = TRUTH["beta"] / (TRUTH["alpha"] + 0.9 * TRUTH["beta"])
    n = np.exp(np.log(4.5e8) + a * np.log(flops / 1e19)) * np.tile(np.geomspace(0.5, 2, 7), 5)
    points = replace(planted(n, flops / (20 * n**0.9), 0.0, 0), flops=flops)
    found = fit_isoflop(points, replicates=20)
    best = found.optimum(1e19)
    assert best["d"] == pytest.approx(1e19 / (20 * best["n"] ** 0.9), rel=1e-6)
    assert best["d_exponent"] == pytest.approx(1 - 0.9 * found.a, rel=1e-6)
    assert best["interval"]["d"][0] <= best["d"] * 1.001 and best["interval"]["d"][1] >= best["d"] * 0.999
    assert found.bias is not None and found.bias["a"] == pytest.approx(found.a - a, abs=1e-3)


def test_three_sizes_a_budget_have_no_interval() -> None:
    found = fit_isoflop(ladder(0.001, 0, sizes=3, wide=2.0), replicates=20)
    assert isoflop_result(found, found.optimum(1e20))["interval"] == {}
    assert any("there are no intervals" in warning for warning in found.warnings)
