"""`lmworks runs` and sweeps: a table of them, one with its trials, trials as the runs that they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweeps import make_sweep

from lmworks.sweep.folder import Sweep
from lmworks.train import Trainer
from typed import lmworks

SPACE = {"optim.lr": {"values": [1e-2, 2e-2, 3e-2]}}


@pytest.fixture
def sweep(tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Two trials that have finished, as a worker leaves them, and one that has not begun."""
    monkeypatch.chdir(tmp_path)
    made = make_sweep(Path("sweeps/lr"), dataset, SPACE, "optim.steps=2")
    for number, point in enumerate(made.space.points()):
        trial = made.propose(point)
        if number < 2:
            Trainer(made.spec(point, number), made.folder(number).path, quiet=True).run()
            with made.claimed(number):
                made.write(made.update(trial))
    return made


def test_runs_lists_sweeps(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "runs")
    losses = [(trial.result or {}).get("val_loss", 9.0) for trial in sweep.trials()]
    best = losses.index(min(losses))
    assert code == 0 and "no runs yet" not in out
    (line,) = [line for line in out.splitlines() if "sweeps/lr" in line]
    assert line.split()[:7] == ["sweeps/lr", "sweep", "optim.lr", "unfinished", "1", "queued,", "2"]
    assert f"{min(losses):.4f}" in line
    rows = json.loads(lmworks(capsys, "runs", "--json")[1])
    assert [row["sweep"] for row in rows] == ["lr"]
    assert rows[0]["trials"] == {"queued": 1, "finished": 2}
    assert rows[0]["best"]["number"] == best and rows[0]["best"]["val_loss"] == min(losses)


def test_trials_are_listed_and_compared_as_runs(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(lmworks(capsys, "runs", "sweeps/lr", "--json")[1])
    assert [row["path"] for row in rows if "sweep" not in row] == ["sweeps/lr/trials/0001", "sweeps/lr/trials/0000"]
    paths = [f"sweeps/lr/trials/000{number}" for number in range(2)]
    compared = json.loads(lmworks(capsys, "runs", "--compare", *paths, "--json")[1])
    assert compared["differs"] == {"optim.lr": [1e-2, 2e-2]}
    assert lmworks(capsys, "report", paths[0])[0] == 0


def test_runs_show_of_a_sweep(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "runs", "show", "sweeps/lr")
    assert code == 0 and "best: trial" in out
    states = [line.split()[2] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert states == ["finished", "finished", "queued"]
    found = json.loads(lmworks(capsys, "runs", "show", "sweeps/lr", "--json")[1])
    assert [trial["state"] for trial in found["trials"]] == states
    (sweep.path / "sweep.json").write_text("{}")
    code, _, err = lmworks(capsys, "runs")
    assert code == 0 and "sweeps/lr" in err and "format None" in err


def test_a_forked_run_has_a_report(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no prediction.json, and its first step is not step 1."""
    fork = sweep.propose({"optim.steps": 4}, parent=(0, 2))
    Trainer.resume(sweep.folder(fork.number).path, quiet=True).run()
    path = str(sweep.folder(fork.number).path)
    assert lmworks(capsys, "report", path)[0] == 0
    code, out, _ = lmworks(capsys, "runs", "show", path)
    assert code == 0 and "2 to 4" in out and "begun from step 2 of" in out
