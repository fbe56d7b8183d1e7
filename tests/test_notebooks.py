"""notebooks/: what is committed reads as a finished run, and the notebook runs headless on a ladder of seconds."""

from __future__ import annotations

import importlib.util
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lmworks.scaling.fitting import fit_law
from lmworks.scaling.points import read_points
from lmworks.scaling.recommend import Budget, recommend
from lmworks.spec import LMWorksError
from lmworks.spec.load import load_run
from lmworks.sweep.folder import Sweep

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/scaling-laws.ipynb"
LADDER = """
spec = "base.toml"
params = [2.9e4, 5.3e4, 8.6e4]
flops = [6e8, 1.2e9]
schedule = "wsd"
batch_tokens = 64
max_epochs = 1000
holdout = { flops = 1.5e9 }
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


@pytest.fixture
def folder(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "base.toml").write_text(BASE % dataset)
    (tmp_path / "tiny.toml").write_text(LADDER)
    monkeypatch.setenv("LADDER", "tiny.toml")
    return tmp_path


@pytest.mark.slow
def test_it_runs_on_a_ladder_of_seconds(folder: Path) -> None:
    check(folder, run_headless(folder))


def run_headless(folder: Path) -> dict[str, Any]:
    execute = importlib.util.spec_from_file_location("execute", ROOT / "notebooks/execute.py")
    assert execute and execute.loader
    module = importlib.util.module_from_spec(execute)
    execute.loader.exec_module(module)
    done: dict[str, Any] = module.execute(NOTEBOOK, folder / "done.ipynb", folder)
    return done


def check(folder: Path, done: dict[str, Any]) -> None:
    """What it printed, against the sweep that it left and against what the library makes of that sweep."""
    sweep, said = Sweep.open(folder / "sweeps/tiny"), printed(done)
    trials = sweep.trials()
    assert [trial.state for trial in trials] == ["finished"] * 7
    predicted = json.loads((sweep.path / "holdout.json").read_text())
    assert set(predicted["params"]) == {"E", "A", "alpha", "B", "beta"} and predicted["points"] == 6
    measured = (trials[predicted["number"]].result or {})["val_loss"]
    assert math.isfinite(measured) and f"measured  {measured:.4f}" in said
    assert f"predicted {predicted['loss']:.4f}" in said
    started = datetime.fromisoformat(sweep.folder(predicted["number"]).events()[0]["time"]).timestamp()
    assert (sweep.path / "holdout.json").stat().st_mtime < started
    assert "predicted before it started: True" in said

    points = read_points(sweep.path, conditions=[f"trial!={predicted['number']}"])
    for name, value in fit_law(points, "chinchilla", replicates=0, hold_out=False).fitted.params.items():
        assert f"{name:>6} {value:10.4g} " in said
    assert own_recommendation(sweep, 10 * predicted["flops"]) in said
    spec = load_run(sweep.path / "recommended.toml")
    assert spec.ranks == 8 and 1e9 < spec.model.params < 2e10
    assert f"{spec.model.params} parameters, {spec.optim.steps} steps of {spec.tokens_per_step} tokens" in said
    assert "Memory at the highest moment of a step" in said


def own_recommendation(sweep: Sweep, flops: float) -> str:
    """By the law of all runs, the holdout among them."""
    spec = sweep.spec({})
    budget = Budget(flops, "1xh100", vocab=spec.model.vocab, seq=spec.data.seq, data=spec.data.path)
    try:
        found = recommend(fit_law(read_points(sweep.path), "chinchilla").fitted, budget)
    except LMWorksError as refusal:
        return f"refused: lmworks: error: {refusal}"
    return f"N {found.choice.shape.n:.3g}, D {found.choice.tokens:.3g}, {found.choice.shape.text}"
