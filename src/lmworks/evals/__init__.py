"""Evaluations: suites of problems as small files, samples and verdicts in a folder, scores with intervals
(docs/evals.md)."""

from .compare import compare_results
from .metrics import pass_at_k
from .results import read_result
from .runner import run_suite
from .suite import Suite, load_suite, suite_names

__all__ = ["Suite", "compare_results", "load_suite", "pass_at_k", "read_result", "run_suite", "suite_names"]
