"""Estimators, against exact combinatorics, scipy and a plain Levenshtein."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb
from typing import Any

import numpy as np
import pytest

from lmworks.evals.compare import check_baseline, compare_results, mcnemar, permutation, regressions, unscored
from lmworks.evals.metrics import bootstrap, edit_similarity, levenshtein, pass_at_k
from lmworks.spec import SpecError


def reference() -> Any:
    """Imported by the one worker that runs these tests, not by all that collect them."""
    return pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("samples", [1, 2, 5, 20, 200])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(samples: int) -> None:
    for correct in range(0, samples + 1, max(1, samples // 7)):
        for k in (k for k in (1, 2, 10, 100) if k <= samples):
            exact = 1 - Fraction(comb(samples - correct, k), comb(samples, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_beyond_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3"):
        pass_at_k(2, 1, 3)


def test_bootstrap_interval_of_a_mean_is_scipys() -> None:
    draw = np.random.default_rng(3)
    values = draw.random(120)
    found = bootstrap(values.tolist())
    theirs = reference().bootstrap((values,), np.mean, n_resamples=9999, method="percentile", rng=1).confidence_interval
    assert found.value == pytest.approx(values.mean())
    width = theirs.high - theirs.low
    assert abs(found.low - theirs.low) < 0.06 * width and abs(found.high - theirs.high) < 0.06 * width


def test_weights_make_a_ratio() -> None:
    assert bootstrap([1.0, 4.0], [3.0, 1.0]).value == 1.75


def plain_levenshtein(one: str, other: str) -> int:
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (a != b)))
        rows.append(row)
    return rows[-1][-1]


def test_levenshtein_is_the_textbooks() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one, other = ("".join(draw.choices("abc", k=draw.randint(0, 9))) for _ in range(2))
        assert levenshtein(one, other) == plain_levenshtein(one, other), (one, other)
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity("", "") == 1.0


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (1, 5), (7, 7), (12, 3), (0, 30)])
def test_mcnemar_is_the_binomial_test(only_first: int, only_second: int) -> None:
    count = only_first + only_second
    theirs = reference().binomtest(only_first, count, 0.5).pvalue if count else 1.0
    assert mcnemar(only_first, only_second) == pytest.approx(theirs, rel=1e-9)


def test_permutation_of_few_pairs_is_exact() -> None:
    draw = np.random.default_rng(5)
    differences = draw.normal(0.3, 1.0, 12)
    zeros = np.zeros(12)
    theirs = reference().permutation_test(
        (differences, zeros), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )
    assert permutation(differences.tolist()) == pytest.approx(theirs.pvalue, rel=1e-9)


def test_permutation_of_many_pairs_is_near_scipys() -> None:
    differences = np.random.default_rng(6).normal(0.15, 1.0, 150)
    theirs = (
        reference()
        .permutation_test(
            (differences, np.zeros(150)),
            lambda x, y, axis: np.mean(x - y, axis=axis),
            permutation_type="samples",
            n_resamples=20_000,
            vectorized=True,
            rng=2,
        )
        .pvalue
    )
    assert permutation(differences.tolist()) == pytest.approx(theirs, abs=0.012)


def result(metric: str, scores: dict[str, float], higher: bool = True) -> dict[str, object]:
    return {"suite": "s", "metric": metric, "higher_is_better": higher, "scores": {metric: scores}}


def test_binary_scores_are_compared_by_mcnemar() -> None:
    first = {str(n): float(n < 10) for n in range(20)}
    second = {str(n): float(n < 4) for n in range(20)}
    found = compare_results(result("pass", first), result("pass", second))
    assert (found.test, found.better, found.worse, found.p) == ("McNemar", 0, 6, mcnemar(6, 0))
    assert found.difference == pytest.approx(-0.3)


def test_a_loss_that_rises_is_a_regression_and_one_that_falls_is_none() -> None:
    base = result("nll", {str(n): 2.0 + n / 100 for n in range(30)}, higher=False)
    worse = result("nll", {str(n): 2.1 + n / 100 for n in range(30)}, higher=False)
    assert [one.suite for one in regressions({"s": base}, {"s": worse}, 0.05)] == ["s"]
    assert not regressions({"s": worse}, {"s": base}, 0.05)


def test_noise_is_no_regression() -> None:
    base = result("pass", {str(n): float(n % 2) for n in range(20)})
    other = result("pass", {str(n): float(n % 2) if n else 0.0 for n in range(20)} | {"1": 0.0})
    assert not regressions({"s": base}, {"s": other}, 0.05)  # one problem lost of twenty


def test_problems_without_a_score_are_no_pass() -> None:
    """Of those that were refused there is no likelihood: the few that are left say nothing of the others."""
    base = result("nll", {str(n): 2.0 for n in range(8)}, higher=False) | {"problems": 8}
    refused = result("nll", {"1": 2.0}, higher=False) | {"problems": 8}
    limited = result("nll", {"1": 2.0}, higher=False) | {"problems": 1}
    assert not regressions({"s": base}, {"s": refused}, 0.05)
    assert unscored({"s": base}, {"s": refused}) == ["s: 7 of 8 problems have no score, 0 before"]
    assert unscored({"s": base}, {"s": limited}) == unscored({"s": refused}, {"s": refused}) == []


def test_a_suite_that_the_baseline_lacks_is_named() -> None:
    with pytest.raises(SpecError, match="the baseline has no suite 's'; it has other"):
        check_baseline({"other": {}}, ["s"])
