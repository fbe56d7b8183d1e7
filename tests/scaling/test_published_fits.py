"""Fits of published runs give the published constants: Besiroglu et al.'s refit of Chinchilla, Gadre et al.'s law."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.scaling.fitting import Fit, fit_law
from lmworks.scaling.points import Points, read_points
from lmworks.spec import SpecError

DATA = Path(__file__).parents[2] / "validation" / "scaling"
REFIT = {"A": 477.84, "B": 2143.86, "E": 1.81724, "alpha": 0.347313, "beta": 0.367183}  # arXiv 2404.10102
SHAPES = ("d=96_l=8_h=4-1.0", "d=512_l=8_h=4-1.0", "d=576_l=24_h=8-1.0", "d=1024_l=24_h=8-1.0", "d=96_l=8_h=4-16.0")
FIVE = "|".join(f"rpj-{shape}" for shape in SHAPES)  # arXiv 2403.08540: 20 tokens a parameter, and 0.011B at 320


def gadre(names: str) -> Points:
    """Loss on C4's validation set (`eval_data_c4_val`), parameters with embeddings."""
    return read_points(DATA / "gadre_runs.csv", target="eval_data_c4_val", conditions=[f"name={names}"])


@pytest.fixture(scope="module")
def refit() -> Fit:
    return fit_law(read_points(DATA / "chinchilla_points.csv", drop=5), "chinchilla")


def test_the_refit_of_chinchilla(refit: Fit) -> None:
    assert len(refit.points) == 240
    assert refit.objective == pytest.approx(1.018274e-3, rel=1e-5)
    assert refit.fitted.params == pytest.approx(REFIT, rel=0.02)
    assert refit.starts_agreeing == refit.starts


def test_its_optimum_at_the_budget_of_chinchilla(refit: Fit) -> None:
    best = refit.fitted.optimum(5.76e23)
    assert best["tokens_per_param"] == pytest.approx(17.9, abs=0.05)
    assert 6 * best["n"] * best["d"] == pytest.approx(5.76e23)
    assert best["n_exponent"] == pytest.approx(REFIT["beta"] / (REFIT["alpha"] + REFIT["beta"]), abs=2e-3)


def test_its_intervals_are_those_of_besiroglu(refit: Fit) -> None:
    """Their bootstrap has standard errors of 0.02 for α and β, and of 0.03 for E; 90 % is ±1.645 of them."""
    for name, error in (("alpha", 0.02), ("beta", 0.02), ("E", 0.03)):
        low, high = refit.fitted.interval[name]
        assert 0.6 * error < (high - low) / 3.29 < 1.5 * error, name


def test_gadre_tied_exponents_predict_the_large_runs() -> None:
    fitted = fit_law(gadre(FIVE), "tied", replicates=0).fitted
    for name in ("rpj-open_lm_1b-32.0", "rpj-open_lm_7b-1.0"):  # 1.4B on 900B tokens, 6.9B on 138B
        run = gadre(name)
        n, d = run.need("n", "")[0], run.need("d", "")[0]
        assert fitted.predict(n=n, d=d)["loss"] == pytest.approx(run.loss[0], rel=0.01), name


def test_five_points_are_too_few_for_five_parameters() -> None:
    with pytest.raises(
        SpecError, match=r"5 points for the 5 parameters of --law chinchilla.*--law tied \(4 parameters\)"
    ):
        fit_law(gadre(FIVE), "chinchilla")
