"""`lmworks plan reliability`: published rates, given times, those of a run, and what is wrong with an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import RunSpec, SpecError

FEW = ("--trials", "20", "--days", "5")


def plan(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", "reliability", *FEW, *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_the_published_clusters() -> None:
    found = plan()
    assert [(one["gpus"], one["saves"]) for one in found] == [
        (1024, "synchronous"),
        (1024, "asynchronous"),
        (16_384, "synchronous"),
        (16_384, "asynchronous"),
    ]
    largest = found[-1]["recovery"]
    assert largest["mtbf_s"] == pytest.approx(54 * 86_400 / 419)
    assert largest["write_s"] == pytest.approx(405e9 * 12 / 2e12)  # bytes over what the storage takes
    assert found[1]["recovery"]["write_s"] == pytest.approx(405e9 * 12 / 1024 / 1e9)  # few GPUs do not fill it
    assert found[2]["recovery"]["stall_s"] == pytest.approx(largest["stall_s"] + largest["write_s"])
    assert largest["restart_s"] == pytest.approx(300 + largest["write_s"])
    assert found[-1]["mean"] > found[2]["mean"]
    rates = {rate: plan("--gpus", "16384", "--rate", rate)[0]["recovery"]["mtbf_s"] for rate in ("rsc1", "0.8125")}
    assert rates["rsc1"] == pytest.approx(rates["0.8125"]) == pytest.approx(1.8 * 3600, rel=0.01)


def test_given_times_and_an_interval_in_use() -> None:
    given = ("--stall-s", "2", "--write-s", "50", "--load-s", "70", "--restart-s", "100", "--detect-s", "9")
    sync, parallel = plan("--gpus", "8192", *given, "--step-s", "10", "--every", "100")
    recovery = parallel["recovery"]
    assert [recovery[key] for key in ("stall_s", "write_s", "restart_s", "detect_s")] == [2, 50, 170, 9]
    assert sync["recovery"]["stall_s"] == 52
    assert parallel["used_every"] == 100
    assert parallel["used_mean"] == parallel["curve"]["100"] < parallel["mean"]
    shown = CliRunner().invoke(app, ["plan", "reliability", *FEW, "--gpus", "8192", "--every", "100"]).stdout
    assert "every 100 steps" in shown
    assert "6:11:10" in shown  # twice the 3:05:35 of 16,384


def test_the_times_of_a_run(tmp_path: Path) -> None:
    spec = RunSpec.from_dict({"model": {"preset": "tiny"}, "optim": {"steps": 4, "warmup": 0}})
    folder = RunFolder.create(tmp_path / "run", spec)
    folder.event("start", 0, attempt=0)
    with MetricsWriter(folder.metrics_path, 0) as metrics:
        metrics.write(1, {"step_s": 0.25, "checkpoint_s": 0.0, "tokens": 10})
    with pytest.raises(SpecError, match="the run has not saved yet"):
        plan("--run", str(folder.path))
    folder.event("save", 1, seconds=0.5, write_s=4.0)
    found = plan("--run", str(folder.path), "--gpus", "1024")[1]
    assert found["step_s"] == 0.25
    assert (found["recovery"]["stall_s"], found["recovery"]["write_s"]) == (0.5, 4.0)
    assert found["recovery"]["restart_s"] == 300  # it was never resumed: what is assumed of all, and not nothing
    given = plan("--run", str(folder.path), "--gpus", "1024", "--stall-s", "2", "--write-s", "9")[1]
    assert (given["recovery"]["stall_s"], given["recovery"]["write_s"]) == (2.0, 9.0)


def test_a_run_that_saves_synchronously_says_nothing_of_other_saves(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", RunSpec.from_dict({"model": {"preset": "tiny"}}))
    folder.event("start", 0, attempt=0)
    folder.event("save", 1, seconds=0.5, write_s=0.0)
    words = ("--run", str(folder.path), "--gpus", "1024", "--restart-s", "60")
    assert [(one["saves"], one["recovery"]["restart_s"]) for one in plan(*words)] == [("synchronous", 60)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--rate", "mine"), "--rate mine: give llama3, rsc1, rsc2, or stops in 1,000 days of one GPU"),
        (("--rate", "nan"), "--rate nan: give"),
        (("--gpus", "0"), "--gpus = 0: give more than 0"),
        (("--storage-gbs", "-1"), "--storage-gbs = -1.0: give more than 0"),
        (("--restart-s", "-1000"), "restart_s = -995"),
        (("--trials", "0"), "trials = 0: give 1 or more"),
        (("--run", "nowhere"), "nowhere is not a run folder"),
        (("--run", "nowhere", "--load-s", "3"), "--load-s with --run"),
    ],
)
def test_bad_usage(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(SpecError, match=error.replace("+", r"\+")):
        plan(*words)
