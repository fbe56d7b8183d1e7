"""Drills in a real fleet. A drill must pass, and one that does more harm than it allows must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmworks.drill.drills import DRILLS
from lmworks.drill.incident import Stage
from lmworks.drill.monitoring import alert_rules
from lmworks.drill.run import BY_NAME, run_drills

pytestmark = pytest.mark.slow


def test_a_killed_server_is_not_noticed_and_a_killed_fleet_is(tmp_path: Path) -> None:
    def kill_all(stage: Stage) -> None:
        for name in stage.fleet.names:
            stage.fleet.kill(name)

    broken = replace(BY_NAME["server-killed"], name="broken", plant=kill_all)  # allows less than what must happen
    passed, failed = run_drills([BY_NAME["server-killed"], broken], tmp_path, None, print, print)
    assert passed.ok, passed.checks
    assert passed.tenants["blue"]["during"]["requests"] > 5
    assert {one.name for one in failed.checks if not one.ok} & {"lost streams", "failed requests", "refused requests"}


@pytest.mark.parametrize("name", ["engine-out-of-memory", "cache-poisoned", "rollout-wrong"])
def test_incidents_of_one_engine_and_of_one_version(name: str, tmp_path: Path) -> None:
    (report,) = run_drills([BY_NAME[name]], tmp_path, alert_rules(), print, print)
    assert report.ok, [one for one in report.checks if not one.ok]


def test_names_are_unique() -> None:
    assert len({one.name for one in DRILLS}) == len(DRILLS) >= 25
