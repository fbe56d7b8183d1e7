"""Trials: queued up to a step, paused, resumed bitwise, forked, stopped; and a folder that refuses another sweep."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import FIGURES, figures, make_sweep

import lmworks.cli.main  # which forked workers find loaded
import lmworks.cli.trial_imports  # noqa: F401
from lmworks.spec import LMWorksError, SpecError, load_run
from lmworks.sweep.folder import Sweep, base_of
from lmworks.sweep.listing import summarize_sweep
from lmworks.sweep.pool import Workers
from lmworks.sweep.space import Space
from lmworks.train import Trainer

LR = {"optim.lr": {"values": [1e-2, 2e-2]}}


@pytest.mark.usefixtures("forked_python")
def test_rungs_forks_and_stops(tmp_path: Path, dataset: Path) -> None:
    """As a tuner drives a sweep: two trials to step 4, the better one further, a fork of it, the other stopped."""
    sweep = make_sweep(tmp_path / "sweep", dataset, LR, kind="tune")
    first = [sweep.propose({"optim.lr": lr}, until=4, notes={"rung": 0}).number for lr in (1e-2, 2e-2)]
    with sweep.driving(), Workers(sweep, 2) as workers:
        with pytest.raises(SpecError, match="is driven by another process"), sweep.driving():
            pass
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
        assert [(t.state, t.step, t.notes) for t in sweep.trials()] == [("paused", 4, {"rung": 0})] * 2
        at_four = sweep.metrics_at(0, 4)
        assert at_four is not None and sweep.trial(0).result is not None
        assert sweep.trial(0).result["val_loss"] == at_four["val_loss"]  # type: ignore[index]
        assert sweep.metrics_at(0, 5) is None
        sweep.stop(first[1])
        fork = sweep.propose({"optim.lr": 5e-3, "seed": 7}, parent=(0, 4))
        sweep.run_until(0, None, {"rung": 1})
        assert workers.wait_any([0, fork.number]).state == "finished"
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
    states = [(trial.state, trial.step) for trial in sweep.trials()]
    assert states == [("finished", 12), ("stopped", 4), ("finished", 12)]
    check_done(sweep)
    whole = Trainer(sweep.spec({"optim.lr": 1e-2}), tmp_path / "whole", quiet=True)
    whole.run()
    without_evaluations = tuple(key for key in FIGURES if key != "val_loss")
    lines = [json.loads(line) for line in whole.folder.metrics_path.read_text().splitlines()]
    expected = [tuple(line.get(key) for key in without_evaluations) for line in lines]
    assert figures(sweep, 0, without_evaluations) == expected
    assert figures(sweep, 0)[-1][-1] == lines[-1]["val_loss"]
    check_fork(sweep, fork.number, expected)


def check_done(sweep: Sweep) -> None:
    """Once its driver has ended, what it left paused is not to be waited for; a driver that breaks off is."""
    assert summarize_sweep(sweep.path)["status"] == "finished"
    with sweep.claimed(1):
        sweep.write(replace(sweep.trial(1), state="paused"))
    assert summarize_sweep(sweep.path)["status"] == "finished"
    with pytest.raises(KeyboardInterrupt), sweep.driving():
        raise KeyboardInterrupt
    assert summarize_sweep(sweep.path)["status"] == "unfinished"


def check_fork(sweep: Sweep, number: int, parents: list[tuple[Any, ...]]) -> None:
    """It goes on from the parent's weights at its own rate, with its own order of the data."""
    found = figures(sweep, number)
    assert [line[0] for line in found] == list(range(5, 13))
    assert sweep.trial(number).parent == {"trial": 0, "step": 4}
    assert found[0][3] == pytest.approx(parents[4][3] / 2)  # the schedule goes on, half as high
    assert found[0][1] != parents[4][1]  # another batch
    assert found[0][1] < parents[0][1] - 0.5  # of a model that was trained
    assert load_run(sweep.folder(number).path).seed == 7
    event = sweep.folder(number).events()[0]
    assert (event["kind"], event["step"]) == ("fork", 4) and event["parent"].endswith("trials/0000")


@pytest.mark.usefixtures("forked_python")
def test_a_fork_with_the_same_spec_is_bitwise_its_parent(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR)
    sweep.propose({"optim.lr": 1e-2}, until=6)
    with Workers(sweep, 1) as workers:
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
    sweep.propose({"optim.lr": 1e-2}, parent=(0, 6))
    sweep.run_until(0, None)
    with Workers(sweep, 2) as workers:
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
    assert figures(sweep, 1) == figures(sweep, 0)[6:]


@pytest.mark.usefixtures("forked_python")
def test_what_fails_is_said_and_does_not_stop_the_others(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR, "optim.steps=2")
    sweep.propose({"data.path": str(tmp_path / "none")})
    sweep.propose({"optim.lr": 1e-2})
    with Workers(sweep, 1) as workers:
        workers.wait_for(lambda trials: all(trial.settled for trial in trials))
    failed, finished = sweep.trials()
    assert (failed.state, finished.state) == ("failed", "finished")
    assert str(tmp_path / "none") in failed.error and "\n" not in failed.error


def test_a_fork_of_what_is_not_there(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR, "optim.steps=2")
    sweep.propose({})
    with pytest.raises(LMWorksError, match=r"trials/0000 has no checkpoint of step 1 to fork"):
        sweep.propose({}, parent=(0, 1))
    Trainer(sweep.spec({}, 0), sweep.folder(0).path, quiet=True).run()
    with pytest.raises(LMWorksError, match=r"no checkpoint of step 1 to fork; it has those of 2"):
        sweep.propose({}, parent=(0, 1))
    with pytest.raises(SpecError, match=r"a fork of .* at step 2 cannot change model.layers = 2, was 1"):
        sweep.propose({"model.layers": 2}, parent=(0, 2))
    assert sweep.numbers() == [0]
    assert sweep.propose({"optim.steps": 4}, parent=(0, 2)).number == 1  # what was half made is made anew


def test_a_running_trial_is_left_alone(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR)
    sweep.propose({})
    with sweep.claimed(0), pytest.raises(LMWorksError, match=r"trial 0 of .* is running"):
        sweep.run_until(0, 5)
    assert not sweep.is_running(0)
    sweep.stop(0)
    assert sweep.trial(0).state == "stopped"
    assert sweep.run_until(0, 5).state == "queued"


@pytest.mark.parametrize(
    ("space", "overrides", "options", "said"),
    [
        (LR, [], {}, ""),
        ({"optim.lr": {"values": [1e-2]}}, [], {}, "a sweep of another space: optim.lr: values = [0.01, 0.02] there"),
        ({**LR, "seed": {"values": [1]}}, [], {}, "another space: seed: not in the space there, values = [1] here"),
        (LR, ["optim.clip=2"], {}, "a sweep of another spec: optim.clip is 1.0, not 2.0; choose another --name"),
        (LR, [], {"seed": 3}, "another sweep: its seed is 0, not 3"),
        (LR, [], {"kind": "tune"}, "another sweep: its kind is 'sweep', not 'tune'"),
        (LR, [], {"settings": {"eta": 3}}, "with other settings: eta is left out, not 3"),
    ],
)
def test_a_folder_holds_one_sweep(
    space: dict[str, Any], overrides: list[str], options: dict[str, Any], said: str, tmp_path: Path, dataset: Path
) -> None:
    made = make_sweep(tmp_path / "sweep", dataset, LR)
    if not said:
        assert make_sweep(tmp_path / "sweep", dataset, space, *overrides, **options) == made == Sweep.open(made.path)
        return
    with pytest.raises(SpecError, match=re.escape(said)):
        make_sweep(tmp_path / "sweep", dataset, space, *overrides, **options)


def test_keys_that_follow_from_others_are_derived_in_each_trial(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('[model]\npreset = "tiny"\n[data]\npath = "mine"\n[optim]\nsteps = 100\n')
    base = base_of(str(tmp_path / "spec.toml"))
    sweep = Sweep.create(tmp_path / "sweep", base, Space.of({"optim.steps": {"values": [100, 500]}}))
    assert [sweep.spec({"optim.steps": steps}).optim.warmup for steps in (100, 500)] == [10, 50]
    assert base["data"]["path"] == str(Path("mine").absolute())
    assert sweep.propose({"optim.steps": 500}).number == 0
    written = load_run(sweep.folder(0).path / "trial.toml")
    assert (written.optim.steps, written.optim.warmup, written.name) == (500, 50, "spec-0000")


def test_a_point_that_is_no_spec_is_named(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR)
    with pytest.raises(SpecError, match=r"optim.lr=-1 seed=3: optim.lr = -1.0 is out of range"):
        sweep.propose({"optim.lr": -1, "seed": 3})
    with pytest.raises(SpecError, match=r"no sweep\.json"):
        Sweep.open(tmp_path)


def test_proposing_twice_changes_nothing(tmp_path: Path, dataset: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep", dataset, LR)
    sweep.propose({"optim.lr": 1e-2}, number=0)
    sweep.stop(0)
    assert sweep.propose({"optim.lr": 1e-2}, number=0).state == "stopped"
