"""Every law comes back from its own losses; derivatives, against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from planted import TRUTH, ladder

from lmworks.scaling.fitting import fit_law
from lmworks.scaling.huber import Terms, huber
from lmworks.scaling.laws import LAWS
from lmworks.scaling.optimum import ATTENTION, FlopRule, optimum
from lmworks.scaling.points import Points

RNG = np.random.default_rng(3)
N, D = np.exp(RNG.uniform(15, 22, 40)), np.exp(RNG.uniform(19, 25, 40))
SEQ = np.tile([512.0, 2048.0, 8192.0, 32768.0], 10)
NATURAL = {
    "chinchilla": TRUTH,
    "tied": {"E": 1.8, "A": 150.0, "B": 400.0, "alpha": 0.29},
    "kaplan": {"Nc": 8.8e13, "Dc": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.095},  # Kaplan et al., table 1.5
    "compute": {"L_inf": 1.7, "a": 1900.0, "alpha": 0.17},
    "context": {**TRUTH, "G": 9.0, "gamma": 0.6},
}


def made(name: str, noise: float = 0.0) -> Points:
    law, flops = LAWS[name], 6 * N * D
    logs = law.log_loss(law.theta(NATURAL[name]), {"n": N, "d": D, "flops": flops, "seq": SEQ})
    loss = np.exp(logs + noise * np.random.default_rng(0).standard_normal(40))
    return Points("made", loss, N, D, flops, seq=SEQ)


@pytest.mark.parametrize("name", LAWS)
def test_a_law_comes_back_from_its_own_losses(name: str) -> None:
    found = fit_law(made(name), name, replicates=0, hold_out=False)
    assert found.fitted.params == pytest.approx(NATURAL[name], rel=1e-3)


@pytest.mark.parametrize("name", LAWS)
def test_derivatives_are_those_of_finite_differences(name: str) -> None:
    law, points = LAWS[name], made(name, 0.01)
    terms: Terms = law.of({"n": N, "d": D, "flops": 6 * N * D, "seq": SEQ})
    theta, delta, y = law.theta(NATURAL[name]), 0.008, np.log(points.loss)

    def value(at: np.ndarray) -> float:
        return float(huber(terms.log_loss(at[None]) - y, delta).sum())

    def gradient(at: np.ndarray) -> np.ndarray:
        off = terms.log_loss(at[None]) - y
        return terms.derivatives(at[None], np.clip(off, -delta, delta), (np.abs(off) <= delta).astype(float))[0][0]

    off = terms.log_loss(theta[None]) - y
    slope, inner = np.clip(off, -delta, delta), (np.abs(off) <= delta).astype(float)
    first, second = terms.derivatives(theta[None], slope, inner)
    steps = 1e-6 * np.eye(len(theta))
    numeric = [(value(theta + step) - value(theta - step)) / 2e-6 for step in steps]
    assert first[0] == pytest.approx(numeric, rel=1e-4, abs=1e-7)
    hessian = np.array([(gradient(theta + step) - gradient(theta - step)) / 2e-6 for step in steps])
    assert second[0] == pytest.approx(hessian, rel=1e-3, abs=1e-4 * np.abs(hessian).max())


def test_the_optimum_is_the_closed_form_of_hoffmann() -> None:
    """Their equation 4: N* = G·(C/6)^(β/(α+β)), G = (αA/βB)^(1/(α+β))."""
    law, budget = LAWS["chinchilla"], 1e22
    best = optimum(law, law.theta(TRUTH)[None], budget, FlopRule())
    alpha, beta = TRUTH["alpha"], TRUTH["beta"]
    share = (alpha * TRUTH["A"] / (beta * TRUTH["B"])) ** (1 / (alpha + beta))
    assert best.n[0] == pytest.approx(share * (budget / 6) ** (beta / (alpha + beta)), rel=1e-6)


def test_attention_flops_make_the_optimum_of_a_long_context_smaller_in_tokens() -> None:
    law = LAWS["context"]
    theta, rule = law.theta(NATURAL["context"])[None], FlopRule(attention=ATTENTION)
    short, long = (optimum(law, theta, 1e21, rule, seq) for seq in (2048.0, 131072.0))
    assert long.d[0] < 0.7 * short.d[0]
    # causal: 6·S·layers·width = 6·S·N/(12·width) beside 6N
    width = (short.n[0] * 128 / 12) ** (1 / 3)
    assert rule.per_token(short.n, 2048.0)[0] == pytest.approx(6 * short.n[0] * (1 + 2048 / (12 * width)))


def test_the_runs_own_flops_are_used_where_they_are_not_6nd() -> None:
    points = ladder(0.0, 0)
    own = Points("own", points.loss, points.n, points.d, 1.5 * points.need("flops", ""))
    best = fit_law(own, "chinchilla", replicates=0).fitted.optimum(1e20)
    assert 9 * best["n"] * best["d"] == pytest.approx(1e20, rel=1e-6)


def test_attention_flops_of_the_runs_are_recovered() -> None:
    points = made("context")
    per_token = 7 * N + 0.3 * SEQ * N ** (2 / 3)
    rule = FlopRule.of(Points("own", points.loss, N, D, per_token * D, seq=SEQ), LAWS["context"])
    assert (rule.coefficient, rule.attention) == pytest.approx((7, 0.3), rel=1e-6)
    assert FlopRule.of(points, LAWS["context"]).attention == ATTENTION


def test_an_outlier_does_not_move_the_law() -> None:
    points = ladder(0.002, 1)
    loss = points.loss.copy()
    loss[3] *= 1.3
    spoilt = Points("spoilt", loss, points.n, points.d, points.flops)
    clean, found = (fit_law(one, "chinchilla", replicates=0).fitted.params for one in (points, spoilt))
    assert found["alpha"] == pytest.approx(clean["alpha"], abs=0.02)
