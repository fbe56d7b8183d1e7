"""`lmworks runs health`: from what a run recorded to what stands behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import RunSpec

SPIKE: dict[str, Any] = {
    "kind": "spike", "step": 13, "cursor": 12, "action": "log", "what": "loss 9 is high",
    "data": {"usual_bits": 4.5, "odd": [{"sample": 99, "entropy_bits": 0.5, "z": -8.0}]},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", RunSpec.from_dict({"model": {"preset": "tiny"}}))
    folder.event(**SPIKE)
    folder.event("skip", 13, from_cursor=12, to_cursor=13, reason="spike_loss")
    folder.event("lower_lr", 14, factor=0.5, until=0, reason="spike_grad")
    folder.event("overflow", 15, loss_scale=65536.0, next_scale=32768.0)
    with MetricsWriter(folder.stats_path, 0) as lines:
        lines.write(10, {"parts": {"embed": {"grad_norm": 0.25}, "0": {"grad_norm": 0.5, "act_rms": 1.0}}})
    return folder


def test_the_command_says_what_happened_and_where_to_look(run: RunFolder) -> None:
    result = CliRunner().invoke(app, ["health", str(run.path), "--stats"])
    assert result.exit_code == 0, result.output
    shown = result.stdout
    assert "0 steps recorded, 1 finding\n" in shown
    assert "sample 99 has 0.50 bits a token" in shown
    assert "step 13: skipped windows 12 to 12 (spike_loss)" in shown
    assert "step 14: learning rate × 0.5 to the end (spike_grad)" in shown
    assert "loss scale went from 65536 to 32768; 1 step left out" in shown
    assert f"lmworks data window {run.path} --cursor 12" in shown
    assert "Statistics of step 10" in shown


def test_programs_get_json(run: RunFolder) -> None:
    found = json.loads(CliRunner().invoke(app, ["health", str(run.path), "--json", "--stats"]).stdout)
    assert found["findings"][0]["cause"] == "data" and found["overflows"] == 1
    assert [event["kind"] for event in found["actions"]] == ["skip", "lower_lr"]
    assert found["stats"]["parts"]["0"]["act_rms"] == 1.0


def test_a_run_without_trouble_has_none(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunSpec.from_dict({"model": {"preset": "tiny"}}))
    shown = CliRunner().invoke(app, ["health", str(folder.path), "--stats"]).stdout
    assert "0 findings" in shown and "health.stats_every" in shown
    assert CliRunner().invoke(app, ["health", str(tmp_path / "none")]).exit_code != 0
