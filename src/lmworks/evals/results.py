"""Estimates of a suite from its verdicts, and result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.errors import DataError, NoSuchData
from ..spec.files import read_json_object
from .metrics import METRICS, Estimate, bootstrap, pass_at_k
from .suite import Suite

Verdicts = Sequence[Mapping[str, Any]]


def summarize(suite: Suite, groups: Mapping[str, str], verdicts: Verdicts) -> dict[str, Any]:
    """`groups`: group by problem. Scores of several samples of a problem are its mean; pass@k is estimated."""
    by_problem: dict[str, list[Mapping[str, Any]]] = {}
    for one in verdicts:
        by_problem.setdefault(one["problem"], []).append(one)
    metrics: dict[str, dict[str, float]] = {}
    scores: dict[str, dict[str, float]] = {}
    for name in suite.metrics:
        values = {
            problem: [one["scores"][name] for one in found if name in one["scores"]]
            for problem, found in by_problem.items()
        }
        values = {problem: found for problem, found in values.items() if found}
        if not values:
            continue
        scores[name] = {problem: float(np.mean(found)) for problem, found in values.items()}
        weights = [weight_of(by_problem[problem], name) for problem in values]
        if name == "pass":
            fewest = min(map(len, values.values()))
            for k in (k for k in suite.k if k <= fewest):
                each = [pass_at_k(len(found), int(sum(found)), k) for found in values.values()]
                metrics[f"pass@{k}"] = bootstrap(each).to_dict()
        else:
            metrics[name] = bootstrap(list(scores[name].values()), weights).to_dict()
    if "nll" in metrics:
        metrics["perplexity"] = exponential(metrics["nll"])
    primary = suite.metrics[0]
    return {
        "suite": suite.name,
        "metric": primary,
        "higher_is_better": METRICS[primary].higher_is_better,
        "problems": len(by_problem),
        "samples": len(verdicts),
        "errors": sum(bool(one.get("error")) for one in verdicts),
        "metrics": metrics,
        "groups": by_group(scores.get(primary, {}), groups),
        "scores": scores,
    }


def weight_of(verdicts: Verdicts, metric: str) -> float:
    return float(sum(one.get("weights", {}).get(metric, 1.0) for one in verdicts) / len(verdicts))


def exponential(estimate: Mapping[str, float]) -> dict[str, float]:
    return Estimate(*(float(np.exp(min(estimate[name], 700.0))) for name in ("value", "low", "high"))).to_dict()


def by_group(scores: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for problem, score in scores.items():
        if group := groups.get(problem):
            found.setdefault(group, []).append(score)
    return {group: float(np.mean(values)) for group, values in found.items()} if len(found) > 1 else {}


def read_result(path: Path) -> dict[str, dict[str, Any]]:
    """Results by suite: of a folder of evaluations, of one evaluation, or of a file that `evals run --json` printed."""
    if path.is_dir():
        files = sorted([*path.glob("result.json"), *path.glob("*/result.json")])
        if not files:
            raise NoSuchData(f"{path} holds no finished evaluation (result.json)")
    elif path.is_file():
        files = [path]
    else:
        raise NoSuchData(f"there is no evaluation at {path}: give the folder of one, or a file of its results")
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        table = read_json_object(file, DataError)
        each = table["suites"] if isinstance(table.get("suites"), dict) else {str(table.get("suite")): table}
        for name, result in each.items():
            if not isinstance(result, dict) or "scores" not in result or "metric" not in result:
                raise DataError(f"{file} is not a result of an evaluation: it has no scores by problem")
            found[name] = result
    return found
