"""`benchmarks/mup_transfer.py`: the optimum of each width, from losses with a known one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mup_transfer  # type: ignore[import-not-found]

    return mup_transfer


def runs_of(script: Any, best: dict[tuple[str, int], float]) -> list[dict[str, Any]]:
    """Losses 2 + (log lr / best)², and none where a rate is 8 times too high."""
    jobs = script.all_jobs(script.WHOLE, 1)
    for job in jobs:
        off = math.log(job["lr"] / best[job["parametrization"], job["width"]])
        job["loss"] = 2 + off**2 if off < math.log(8) else None
    return jobs


def test_drift_of_a_planted_optimum(script: Any) -> None:
    widths = script.WHOLE["widths"]
    best = {("mup", width): 0.0123 for width in widths} | {("standard", width): 1.1 / width for width in widths}
    found = script.summary(script.WHOLE, runs_of(script, best))
    for name in ("mup", "standard"):
        for width in widths:
            assert found["optimum"][name][str(width)]["lr"] == pytest.approx(best[name, width], rel=1e-6)
            assert found["optimum"][name][str(width)]["loss"] == pytest.approx(2.0, abs=1e-9)
    assert found["drift"] == pytest.approx({"mup": 1.0, "standard": 8.0})
    assert found["cost"]["mup"] < 0.05 < 3 < found["cost"]["standard"]  # within the grid; (log 8)²


def test_an_optimum_at_the_edge_is_the_lowest_point(script: Any) -> None:
    assert script.optimum({1.0: 3.0, 2.0: 2.0, 4.0: 1.0}) == (4.0, 1.0)
    assert script.optimum({1.0: 2.0}) == (1.0, 2.0)
