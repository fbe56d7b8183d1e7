"""notebooks/: what is committed reads as a finished run, and the notebook runs headless on a ladder of seconds."""

from __future__ import annotations

import importlib.util
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lmworks.spec.load import load_run
from lmworks.sweep.folder import Sweep

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/scaling-laws.ipynb"
LADDER = """
spec = "base.toml"
params = [5e4, 1.5e5, 2.8e5]
flops = [2e9, 4e9]
schedule = "wsd"
batch_tokens = 64
max_epochs = 1000
holdout = { flops = 8e9 }
"""
BASE = """
name = "ladder"
[model]
hidden = 64
layers = 2
heads = 2
vocab = 320
context = 64
[data]
path = "%s"
seq = 64
micro_batch = 1
[cluster]
device = "cpu"
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: dict[str, Any]) -> str:
    return "".join("".join(out.get("text", "")) for cell in code_cells(notebook) for out in cell["outputs"])


def test_the_committed_notebook_is_one_whole_run() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [out["output_type"] for cell in cells for out in cell["outputs"]]
    assert "error" not in kinds and sum("image/png" in out.get("data", {}) for c in cells for out in c["outputs"]) >= 4
    assert "predicted before it started: True" in printed(notebook)
    assert NOTEBOOK.stat().st_size < 300_000
    assert not any(word in NOTEBOOK.read_text() for word in ("/home/", "/tmp/", "/work/", "/root/", "Warning:"))


@pytest.mark.slow
def test_it_runs_on_a_ladder_of_seconds(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.toml").write_text(BASE % dataset)
    (tmp_path / "tiny.toml").write_text(LADDER)
    monkeypatch.setenv("LADDER", "tiny.toml")
    execute = importlib.util.spec_from_file_location("execute", ROOT / "notebooks/execute.py")
    assert execute and execute.loader
    module = importlib.util.module_from_spec(execute)
    execute.loader.exec_module(module)
    done = module.execute(NOTEBOOK, tmp_path / "done.ipynb", tmp_path)

    sweep = Sweep.open(tmp_path / "sweeps/tiny")
    trials = sweep.trials()
    assert [trial.state for trial in trials] == ["finished"] * 7
    predicted = json.loads((sweep.path / "holdout.json").read_text())
    assert set(predicted["params"]) == {"E", "A", "alpha", "B", "beta"} and predicted["points"] == 6
    measured = (trials[predicted["number"]].result or {})["val_loss"]
    assert math.isfinite(measured) and f"measured  {measured:.4f}" in printed(done)
    assert f"predicted {predicted['loss']:.4f}" in printed(done)
    started = datetime.fromisoformat(sweep.folder(predicted["number"]).events()[0]["time"]).timestamp()
    assert (sweep.path / "holdout.json").stat().st_mtime < started
    assert "predicted before it started: True" in printed(done)
    spec = load_run(sweep.path / "recommended.toml")
    assert spec.ranks == 8 and 1e9 < spec.model.params < 2e10
    assert str(spec.model.params) in printed(done)
    assert "Memory at the highest moment of a step" in printed(done)
