"""ETA: the planner's proportions, the measured pace; what a pipe and a terminal are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import make_sweep

from lmworks.cli import sweep_display
from lmworks.cli.sweep_display import Display, live_lines, print_trials
from lmworks.plan.predict import step_flops
from lmworks.record.claims import Claim
from lmworks.sweep import progress as module
from lmworks.sweep.folder import Sweep
from lmworks.sweep.progress import Progress, counts, last_line
from lmworks.sweep.slots import Resources, take_slots

SPACE = {"model.layers": {"values": [1, 2]}}


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for one in (module, sweep_display):
        monkeypatch.setattr(one, "time", made)
    return made


@pytest.fixture
def sweep(tmp_path: Path, dataset: Path) -> Sweep:
    """Two trials of 12 steps, the second with twice the blocks."""
    made = make_sweep(tmp_path / "sweep", dataset, SPACE)
    for point in made.space.points():
        made.propose(point)
    return made


def write_steps(sweep: Sweep, number: int, count: int) -> None:
    lines = [json.dumps({"step": step, "attempt": 0, "loss": 5.0 - step / 10}) for step in range(1, count + 1)]
    sweep.folder(number).metrics_path.write_text("\n".join([*lines, '{"step": 99, "lo']))


def predict(sweep: Sweep, number: int, step_s: float | None) -> None:
    sweep.folder(number).prediction_path.write_text(json.dumps({"step_s": step_s}))


def eta(progress: Progress) -> float | None:
    return progress.eta_s(progress.update(progress.sweep.trials()))


def test_predictions_give_the_time_before_any_step(sweep: Sweep, clock: Clock) -> None:
    progress = Progress(sweep, workers=2)
    assert eta(progress) is None
    predict(sweep, 0, 0.5)
    specs = [sweep.spec(trial.overrides) for trial in sweep.trials()]
    ratio = step_flops(specs[1]).hardware / step_flops(specs[0]).hardware
    assert 1.2 < ratio < 2
    assert eta(progress) == pytest.approx(12 * 0.5 * ratio)  # two workers: the longer one
    assert eta(Progress(sweep, workers=1)) == pytest.approx(12 * 0.5 * (1 + ratio))
    predict(sweep, 1, 2.0)  # its own prediction counts once it has one
    assert eta(Progress(sweep, workers=1)) == pytest.approx(12 * (0.5 + 2.0))


def test_the_measured_pace_corrects_them(sweep: Sweep, clock: Clock) -> None:
    predict(sweep, 0, 0.5)
    predict(sweep, 1, 1.0)
    claims = [Claim.take(sweep.folder(number).path) for number in range(2)]
    progress = Progress(sweep, workers=2)
    write_steps(sweep, 0, 2)  # before this driver came
    assert eta(progress) == pytest.approx(12 * 1.0)
    clock.now += 30.0
    write_steps(sweep, 0, 8)
    write_steps(sweep, 1, 3)
    # 6 × 0.5 + 3 × 1.0 = 6 predicted seconds took 30; 4 × 0.5 and 9 × 1.0 are left, the longer one alone at the end
    assert eta(progress) == pytest.approx(max((2 + 9) * 30 / 6, 9 * 2 * 30 / 6))
    for claim in claims:
        assert claim is not None
        claim.release()


def test_without_a_calibrated_machine_flops_have_the_proportions(sweep: Sweep, clock: Clock) -> None:
    predict(sweep, 0, None)
    progress, claim = Progress(sweep, workers=1), Claim.take(sweep.folder(0).path)
    assert eta(progress) is None
    clock.now += 10.0
    write_steps(sweep, 0, 12)
    specs = [sweep.spec(trial.overrides) for trial in sweep.trials()]
    ratio = step_flops(specs[1]).hardware / step_flops(specs[0]).hardware
    assert eta(progress) == pytest.approx(10.0 * ratio)
    assert claim is not None
    claim.release()


def test_the_last_whole_line_of_a_running_trial(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sweep.folder(0).metrics_path
    assert last_line(path) is None
    write_steps(sweep, 0, 5)
    assert (last_line(path) or {})["step"] == 5
    monkeypatch.setattr(module, "TAIL_BYTES", 60)
    assert (last_line(path) or {})["step"] == 5


def end(sweep: Sweep, number: int, state: str, **fields: Any) -> None:
    sweep.write(replace(sweep.trial(number), state=state, step=12, **fields))


def test_a_pipe_gets_a_line_for_each_trial_that_ends(
    sweep: Sweep, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Display(Progress(sweep, 2), quiet=False) as display:
        display.update(sweep.trials())
        assert capsys.readouterr().out == "2 queued; ETA: known after the first steps\n"
        clock.now += 5
        display.update(sweep.trials())
        assert capsys.readouterr().out == ""
        end(sweep, 0, "finished", result={"loss": 2.5, "val_loss": 2.25})
        display.update(sweep.trials())
        assert "trial 0 finished: model.layers=1: val 2.2500   (1 queued, 1 finished; ETA" in capsys.readouterr().out
        end(sweep, 1, "failed", error="the loss is not finite")
        display.update(sweep.trials())
        assert "trial 1 failed: model.layers=2: the loss is not finite" in capsys.readouterr().out
    with Display(Progress(sweep, 2), quiet=True) as display:
        display.update(sweep.trials())
        assert capsys.readouterr().out == ""


def test_a_sweep_says_what_it_waits_for(
    sweep: Sweep, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A core of two is another sweep's, then both are; a trial that runs here leaves the second worker waiting."""
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cores = Resources((0, 1))
    held = [take_slots(cores, 1, 0, Path("sweeps/lr"))]
    with Display(Progress(sweep, 2, cores), quiet=False) as display:

        def said() -> str:
            clock.now += 5
            display.update(sweep.trials())
            return capsys.readouterr().out

        assert said() == "2 queued; ETA: known after the first steps\n"
        held.append(take_slots(cores, 1, 0, Path("sweeps/lr")))
        waiting = "waiting for 1 core: held by sweeps/lr; ETA: known after the first steps\n"
        assert said() == f"2 queued; {waiting}"
        assert said() == ""  # once is enough
        assert held[0]
        held[0].release()
        claim, own = Claim.take(sweep.folder(0).path), take_slots(cores, 1, 0, sweep.path)
        assert said() == "" and display.status(display.progress.update(sweep.trials()), "x").startswith(
            "1 queued, 1 running"
        )
        assert display.progress.waits_for(display.progress.update(sweep.trials())) == "1 core: held by sweeps/lr"
        assert held[1] and claim and own
        held[1].release()
        assert display.progress.waits_for(display.progress.update(sweep.trials())) == ""
        claim.release()
        own.release()


def test_tables(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    end(sweep, 0, "finished", result={"loss": 2.5, "val_loss": 2.25})
    end(sweep, 1, "failed", error="the loss is not finite")
    sweep.propose({"model.layers": 3}, until=6)
    claim = Claim.take(sweep.folder(2).path)
    write_steps(sweep, 2, 4)
    rows = Progress(sweep, 2).update(sweep.trials())
    assert counts(rows) == {"running": 1, "finished": 1, "failed": 1}
    assert claim is not None
    claim.release()
    lines = [line.plain for line in live_lines(rows, "status", 80)]
    shown = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert shown == [["2", "3", "running", "4/6", "4.6000", "-"], ["0", "1", "finished", "12/12", "2.5000", "2.2500"]]
    assert lines[-1] == "status; 1 more trials"
    print_trials("Trials", rows)
    out = capsys.readouterr().out
    assert "trial 1 failed: the loss is not finite" in out
    assert "best: trial 0, val 2.2500: model.layers=1" in out
