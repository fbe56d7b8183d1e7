"""`lmworks tune`: stable JSON, one-line errors, and a search with real trials."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from formula_trials import FormulaWorkers, driver
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.tune.importances import importances
from lmworks.tune.outcome import outcome_of

SPACE = """
[optim.lr]
range = [1e-4, 1e-1]
log = true
"""
QUICK = ["optim.steps=9", "data.seq=32", "data.micro_batch=2", "log.eval_batches=2", "cluster.device=cpu"]


def found(*words: str) -> Any:
    return json.loads(CliRunner().invoke(app, ["tune", *words], catch_exceptions=False).stdout)


@pytest.fixture
def search(tmp_path: Path) -> Path:
    tuner = driver(tmp_path, trials=18)
    tuner.run(FormulaWorkers(tuner.sweep))
    return tuner.sweep.path


def test_json_has_the_best_and_all_trials(search: Path) -> None:
    facts = found("show", str(search), "--json")
    assert len(facts["trials"]) == 18
    finished = [trial for trial in facts["trials"] if trial["state"] == "finished"]
    assert facts["best"] == min(finished, key=lambda trial: trial["loss"])
    assert list(facts["best"]["losses"]) == ["10", "30", "90"]
    assert facts["best"]["overrides"].keys() == {"optim.lr", "optim.clip"}
    diverged = [trial for trial in facts["trials"] if trial["overrides"]["optim.lr"] > 0.1]
    assert diverged
    assert all(trial["loss"] is None and "diverged" in trial["stopped"] for trial in diverged)


def test_people_get_a_table_and_what_to_look_at(search: Path) -> None:
    shown = CliRunner().invoke(app, ["tune", "show", str(search)], catch_exceptions=False).stdout
    assert "best: trial " in shown
    assert "finished" in shown


def test_plots_are_drawn(search: Path, tmp_path: Path) -> None:
    CliRunner().invoke(app, ["tune", "show", str(search), "--plots", str(tmp_path / "plots")], catch_exceptions=False)
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"isolation.png", "curves.png", "history.png", "parallel.png"} <= drawn


def test_the_key_that_matters_is_the_important_one(tmp_path: Path) -> None:
    tuner = driver(tmp_path, "none", trials=20, algorithm="random")
    tuner.run(FormulaWorkers(tuner.sweep))
    shares = importances(outcome_of(tuner.sweep))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["optim.lr"] > 0.8


@pytest.mark.parametrize(
    ("space", "words", "said"),
    [
        ("", [], "the space is empty"),
        ("[optim.learning]\nvalues = [1]", [], "unknown key"),
        ("[optim.steps]\nvalues = [10, 20, 30]", [], "trials are compared after equal steps"),
        (SPACE, ["--algorithm", "annealing"], "unknown --algorithm 'annealing'"),
        (SPACE, ["--stopper", "ashe"], "did you mean 'asha'"),
        (SPACE, ["--stop-on", "plateau"], "unknown --stop-on"),
        (SPACE, ["--eta", "1"], "--eta must be 2 or more"),
        (SPACE, ["--min-steps", "1000"], "--min-steps must be from 1"),
        (SPACE, ["--algorithm", "grid"], "add points"),
        (SPACE, ["--storage", "redis://nowhere"], "--storage redis://nowhere"),
        (SPACE, ["--storage", "sqlite:///x.db", "--algorithm", "pbt"], "pbt keeps all in the sweep's folder"),
        (SPACE, ["--interval", "5"], "--interval 5 is of pbt and pb2"),
        (SPACE, ["--max-dollars", "5"], "--max-dollars needs an accelerator with a price"),
        ("[model.layers]\nvalues = [1, 2]", ["--algorithm", "pbt"], "a run cannot change model.layers"),
        ("[optim.schedule]\nvalues = ['cosine', 'wsd']", ["--algorithm", "pb2"], "pb2 needs ranges"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, space: str, words: list[str], said: str
) -> None:
    spec = Path("configs/tiny.toml").resolve()
    monkeypatch.chdir(tmp_path)
    Path("space.toml").write_text(space)
    result = CliRunner().invoke(app, ["tune", str(spec), "--space", "space.toml", *QUICK, *words])
    assert said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not Path("sweeps").exists()


def test_without_optuna_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = Path("configs/tiny.toml").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    Path("space.toml").write_text(SPACE)
    result = CliRunner().invoke(app, ["tune", str(spec), "--space", "space.toml", *QUICK])
    assert 'pip install "lmworks[tune]"' in str(result.exception)


def test_seeds_of_a_given_spread() -> None:
    facts = found("seeds", "--std", "1", "--difference", "1", "--difference", "2", "--json")
    assert [row["seeds"] for row in facts["seeds"]] == [17, 6]


# --- real trials -----------------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    spec = str(Path("configs/tiny.toml").resolve())
    search = ["--space", "space.toml", "--workers", "1", "--trials", "4", "--json"]
    return [sys.executable, "-m", "lmworks", "tune", spec, *QUICK, *search, *words]


def tune(folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(command(*words), capture_output=True, text=True, check=True, cwd=folder)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_promoted_trial_is_the_run_that_never_paused_and_a_killed_search_goes_on(tmp_path: Path) -> None:
    """ASHA with TPE, real trials; the winner has paused twice. Its losses are those of a plain run, to the last bit."""
    (tmp_path / "space.toml").write_text(SPACE)
    facts = tune(tmp_path)
    assert facts["best"]["step"] == 9
    assert sorted(trial["step"] for trial in facts["trials"])[0] == 1
    best = tmp_path / facts["best"]["run"]
    plain = [sys.executable, "-m", "lmworks", "train", str(best / "trial.toml"), "--run-dir", "plain", "--no-report"]
    subprocess.run(plain, check=True, cwd=tmp_path, capture_output=True)
    paused, straight = (
        {(line["step"], line["loss"]) for line in map(json.loads, (folder / "metrics.jsonl").open())}
        for folder in (best, tmp_path / "plain")
    )
    assert paused == straight
    killed = subprocess.Popen(command("--name", "again"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "sweeps/again/trials/0001/spec.toml").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    again = tune(tmp_path, "--name", "again")
    for first, second in zip(facts["trials"], again["trials"], strict=True):
        for same in ("overrides", "state", "losses"):
            assert first[same] == second[same]


@pytest.mark.slow
def test_a_population_forks_real_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    facts = tune(tmp_path, "--algorithm", "pbt", "--interval", "3")
    forks = [trial for trial in facts["trials"] if trial["parent"]]
    assert len(forks) == 2  # one of four, after steps 3 and 6
    for trial in forks:
        parent = facts["trials"][trial["parent"]["trial"]]
        step = str(trial["parent"]["step"])
        assert trial["losses"][step] == parent["losses"][step]
        assert trial["losses"]["9"] != parent["losses"].get("9")
