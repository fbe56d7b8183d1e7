"""Verdicts on what benchmarks/planted_causes.py recorded: planted causes and their undisturbed twins, judged again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmworks.diagnose.causes import Figures
from lmworks.diagnose.verdict import VERDICTS, ranked_causes, worthwhile

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "planted_causes.json"
HALVES: dict[str, dict[str, Any]] = json.loads(RESULT.read_text())


def runs(half: str) -> list[dict[str, Any]]:
    return [run for part in HALVES[half].values() for run in part["runs"]]


def verdict(run: dict[str, Any]) -> str:
    found = worthwhile(ranked_causes(Figures(**run["figures"])))
    return found[0].verdict if found else "healthy"


@pytest.mark.parametrize("half", ["fit", "score"])
def test_planted_causes_are_named_and_twins_are_healthy(half: str) -> None:
    planted = [run for run in runs(half) if run["variant"] == "planted"]
    twins = [run for run in runs(half) if run["variant"] == "twin"]
    wrong = [f"{run['case']}: {verdict(run)}" for run in planted if verdict(run) != run["expected"]]
    alarms = [f"{run['case']}: {verdict(run)}" for run in twins if verdict(run) != "healthy"]
    assert len(wrong) <= 0.05 * len(planted), wrong
    assert len(alarms) <= 0.02 * len(twins), alarms


def test_no_case_is_in_both_halves() -> None:
    """At least 30 causes in all, three runs each with their twins; those of the fit are of every kind."""
    cases = {half: {run["case"] for run in runs(half)} for half in HALVES}
    assert len(cases["fit"] | cases["score"]) >= 30 and not cases["fit"] & cases["score"]
    assert {run["expected"] for run in runs("fit")} == set(VERDICTS) - {"unknown"}
    for half in HALVES:
        assert len(runs(half)) == 2 * 3 * len(cases[half])
