"""`lmworks plan validate RUNS`: tables with results, and folders of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.record import MetricsWriter, RunFolder
from typed import lmworks

HEAD = "model,gpu,n_gpus,seq_len,global_batch,framework,step_s"
ROW = "llama3-8b,h100,8,8192,16,torchtitan"


def test_a_prediction_of_a_table_sees_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}\n{ROW},100\n{ROW},0.001\n")
    code, out, _ = lmworks(capsys, "plan", "validate", str(path), "--json")
    found = json.loads(out)
    slow, fast = found["runs"][str(path)]
    assert code == 0 and slow["measured"] == 100 and slow["error"] < -0.9 and fast["error"] > 100
    assert found["lines"][0]["score"]["rows"] == 2 and found["lines"][0]["coverage"] == 0
    rows = json.loads(lmworks(capsys, "plan", "predict", str(path), "--json")[1])["rows"]
    assert rows[0]["step_s"] == rows[1]["step_s"] == slow["predicted"] == fast["predicted"]


def test_runs_beside_what_was_predicted_before_their_first_step(
    make_run: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, taken in (("near", 0.11), ("far", 0.2)):
        folder = make_run(steps=0, end=None, name=name)
        said = {"step_s": 0.1, "interval": [0.085, 0.13], "memory_bytes": 900}
        folder.prediction_path.write_text(json.dumps(said))
        with MetricsWriter(folder.metrics_path, 0) as metrics:
            for step in (1, 2, 3):
                metrics.write(step, {"loss": 1.0, "step_s": taken, "memory_bytes": 1000})
    for name, damage in (("short", {"step_s": 0.1, "interval": [0.1]}), ("words", {"step_s": "x", "interval": None})):
        folder = make_run(steps=0, end=None, name=name)
        folder.prediction_path.write_text(json.dumps(damage))
        with MetricsWriter(folder.metrics_path, 0) as metrics:
            metrics.write(1, {"loss": 1.0, "step_s": 0.1})
    silent = make_run(steps=0, end=None, name="silent")
    place = silent.path.parent
    found = json.loads(lmworks(capsys, "plan", "validate", str(place), "--json")[1])
    time, memory = found["lines"]
    assert (time["figure"], time["score"]["rows"], time["coverage"]) == ("step time", 2, 0.5)
    assert time["score"]["mape"] == pytest.approx((1 - 0.1 / 0.11 + 0.5) / 2)
    assert (memory["figure"], memory["score"]["bias"]) == ("allocated", pytest.approx(-0.1))
    nothing = "no step was measured, or nothing was predicted"
    left = {Path(said.split(": ")[0]).name: said.split(": ", 1)[1] for said in found["not_compared"]}
    assert left.keys() == {"silent", "short", "words"} and left["silent"] == left["words"] == nothing
    out = lmworks(capsys, "plan", "validate", str(place))[1]
    assert "step time" in out and "not compared" in out


def test_nothing_to_compare_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.csv").write_text(f"{HEAD}\n{ROW},OOM\n")
    code, _, err = lmworks(capsys, "plan", "validate", str(tmp_path / "runs.csv"))
    assert code == 2 and "nothing to compare" in err and "nothing is measured" in err
    code, _, err = lmworks(capsys, "plan", "validate", str(tmp_path / "none"))
    assert code == 2 and "does not exist" in err
    code, _, err = lmworks(capsys, "plan", "validate", str(tmp_path / "runs.csv"), "--source", "nemo")
    assert code == 2 and "of the published tables" in err
