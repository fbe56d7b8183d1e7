"""Spikes and numbers that are not finite: found, told with their data, and answered as the spec says."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lmworks import checkpoint
from lmworks.record import RunFolder, read_metrics
from lmworks.spec import RunSpec, SpecError, TrainingError
from lmworks.train import Trainer
from lmworks.train.health import bad_step_recovery
from lmworks.train.health.bad_step import Health
from lmworks.train.health.spikes import spike_score
from tiny import Crash, before_step, crash, curve, differences, events, make_spec, resume, saved, train
from typed import lmworks
from unhealthy import WATCH, as_it_is, see_data, spoil_output
from variations import with_slow

BAD = 12  # the window that is bad, and the step it would have been in is 13


def run_on(
    spec: RunSpec, folder: Path, change: Callable[[int], int] = as_it_is, bad: int | None = None, die_at: int = 0
) -> Path:
    trainer = see_data(Trainer(spec, folder, quiet=True), change, bad)
    if die_at:
        before_step(trainer, die_at, crash)
        with pytest.raises(Crash):
            trainer.run()
    else:
        trainer.run()
    return folder


def go_on(folder: Path, bad: int | None) -> Path:
    see_data(Trainer.resume(folder, quiet=True), as_it_is, bad).run()
    return folder


def same(one: Path, other: Path) -> bool:
    return differences(saved(one), saved(other)) == [] and curve(one) == curve(other)


# --- what is a spike -----------------------------------------------------------------------------------


def test_spike_score_is_robust_z_score() -> None:
    draw = random.Random(0)
    before = [draw.gauss(3, 0.1) for _ in range(101)]
    middle = float(np.median(before))
    deviation = 1.4826 * float(np.median(np.abs(np.array(before) - middle)))
    assert spike_score(4.0, before).z == pytest.approx((4.0 - middle) / deviation)
    assert spike_score(2.0, before).z < -5  # below is not a spike, whatever its size
    spoiled = [*before[:60], *[50.0] * 41]  # as many spikes as that, and a new one is still one
    assert spike_score(50.0, spoiled).z > 100
    assert (50.0 - statistics.mean(spoiled)) / statistics.stdev(spoiled) < 2  # what a plain z-score says


def test_nearly_constant_loss_is_no_spike() -> None:
    assert spike_score(2.001, [2.0] * 32).z == pytest.approx(0.05)
    assert spike_score(1e-9, [0.0] * 8).z > 100  # nor is there a division by zero


def test_no_spike_before_warmup(dataset: Path) -> None:
    health = Health(make_spec(dataset, *WATCH).health)
    for number in range(5):
        assert health.check_step(100.0, 1.0, scaled=False) == []
        health.record_step(1.0 + number / 10, 1.0)
    assert health.check_step(100.0, 1.0, scaled=False) == []
    health.record_step(1.5, 1.0)
    (issue,) = health.check_step(100.0, 1.0, scaled=False)
    assert issue.kind == "spike_loss" and issue.what.startswith("loss 100 is ")
    assert [t.kind for t in health.check_step(0.0, 50.0, scaled=False)] == ["spike_grad"]


def test_a_loss_that_leaves_its_start_behind_diverges(dataset: Path) -> None:
    """Before there are enough steps for a spike: the third in a row above twice the first ones, and no other."""

    def found(*losses: float) -> list[str]:
        health = Health(make_spec(dataset).health)
        kinds = []
        for loss in losses:
            limit, _ = health.limits()
            issues = health.check_step(loss, 1.0, scaled=False)
            assert bool(issues) == (loss > limit)
            kinds.append(",".join(issue.kind for issue in issues))
            health.record_step(loss, 1.0)
        return kinds

    assert found(5.7, 5.0, 12.0, 20.0, 40.0, 55.0) == ["", "", "", "", "spike_loss", ""]
    assert found(5.7, 4.6, 14.8, 10.0, 14.3, 32.6, 30.5) == ["", "", "", "", "", "", "spike_loss"]
    assert found(5.7, 5.0, 11.0, 11.3, 11.3, 11.3) == [""] * 6  # less than twice
    assert found(5.7, 5.0, 30.0, 30.0, 5.0, 30.0, 30.0) == [""] * 7  # it comes back
    assert found(-0.1, 0.0, 0.9, 0.9, 0.9, 0.9) == [""] * 6  # policies begin near 0
    assert found(0.3, 0.4, 1.3, 1.3, 1.3) == [""] * 5
    assert found(0.3, 0.4, 1.5, 1.5, 1.5) == ["", "", "", "", "spike_loss"]


@pytest.mark.parametrize("words", [(), ("health.spike_loss=stop",)])
def test_a_learning_rate_of_one_is_found(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """In 20 steps, all of them before health.warmup: `lmworks runs health` names the rate."""
    spec = make_spec(dataset, "optim.steps=20", "optim.lr=1", *words)
    if words:
        with pytest.raises(TrainingError, match=r"and the 2 before it are more than twice the first .*lower optim.lr"):
            train(spec, tmp_path / "run")
    else:
        losses = [line["loss"] for line in read_metrics(train(spec, tmp_path / "run").folder.metrics_path)]
        assert max(losses) > 2 * losses[0]
    code, text, _ = lmworks(capsys, "runs", "health", str(tmp_path / "run"))
    assert code == 0 and "numbers: ordinary data, and it stays there: optim.lr may be too high" in text


def test_window_is_bounded_and_saved(dataset: Path) -> None:
    health = Health(make_spec(dataset, *WATCH).health)
    for number in range(20):
        health.record_step(0.1 * number, 0.3 * number)
    health.lower_lr(5)
    health.record_action(17)
    other = Health(health.spec)
    other.load_state_dict(health.state_dict())
    assert other.state == health.state and len(other.state.losses) == 8
    other.load_state_dict({})  # a checkpoint from before there was any of this
    assert other.state.losses == [] and other.lr_multiplier(9) == 1.0


# --- what is done about it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(make_spec(dataset, *WATCH), tmp_path_factory.mktemp("clean") / "run")


def test_healthy_run_has_no_issues(clean: Path) -> None:
    assert {event["kind"] for event in RunFolder(clean).events()} == {"start", "save", "eval", "finish"}


def test_spike_is_logged_with_its_batch(dataset: Path, tmp_path: Path, clean: Path) -> None:
    run_on(make_spec(dataset, *WATCH), tmp_path / "run", bad=BAD)
    (spike, *_) = events(tmp_path / "run", "spike")
    assert (spike["step"], spike["cursor"], spike["reason"], spike["action"]) == (13, BAD, "spike_loss", "log")
    assert spike["z"] > 4 and spike["loss"] > spike["median"]
    assert spike["data"]["samples"] == [48, 51] and spike["data"]["sources"] == {str(dataset): 4}
    oddness = [abs(row["z"]) for row in spike["data"]["odd"]]
    assert oddness == sorted(oddness, reverse=True) and len(oddness) == 3
    assert 0 < spike["data"]["entropy_bits"] < 8 and 0 < spike["data"]["usual_bits"] < 8
    lines = read_metrics(RunFolder(tmp_path / "run").metrics_path)
    assert [line["step"] for line in lines] == list(range(1, 21))  # it went on
    assert curve(tmp_path / "run")[:12] == curve(clean)[:12]


def test_skipped_batch_equals_run_without_it(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *WATCH, "health.spike_loss=skip")
    run_on(spec, tmp_path / "run", bad=BAD)
    run_on(spec, tmp_path / "without", lambda cursor: cursor + (cursor >= BAD))
    assert same(tmp_path / "run", tmp_path / "without")
    (skip,) = events(tmp_path / "run", "skip")
    assert (skip["step"], skip["from_cursor"], skip["to_cursor"], skip["reason"]) == (13, BAD, BAD + 1, "spike_loss")
    run_on(spec, tmp_path / "killed", bad=BAD, die_at=15)  # after the skip, which no checkpoint knows of yet
    assert same(go_on(tmp_path / "killed", BAD), tmp_path / "run")
    run_on(spec, tmp_path / "later", bad=BAD, die_at=18)  # it does know
    assert same(go_on(tmp_path / "later", BAD), tmp_path / "run")


REWIND = (*WATCH, "health.spike_loss=rewind")


def test_rewind_loads_checkpoint_and_skips_data(dataset: Path, tmp_path: Path) -> None:
    """Failed in step 13, at least 2 back, saved every 4: to step 8, and windows 8 to 12 are not trained on."""
    spec = make_spec(dataset, *REWIND)
    run_on(spec, tmp_path / "run", bad=BAD)
    run_on(spec, tmp_path / "without", lambda cursor: cursor + (5 if cursor >= 8 else 0))
    assert same(tmp_path / "run", tmp_path / "without")
    (back,) = events(tmp_path / "run", "rewind")
    assert (back["from_step"], back["to_step"], back["reason"]) == (12, 8, "spike_loss")
    (skip,) = events(tmp_path / "run", "skip")
    assert (skip["from_cursor"], skip["to_cursor"]) == (8, 13)
    for die_at in (10, 14):
        killed = run_on(spec, tmp_path / f"killed-{die_at}", bad=BAD, die_at=die_at)
        assert same(go_on(killed, BAD), tmp_path / "run")


@pytest.mark.parametrize("place", with_slow(["save", "delete_after"], ["delete_after"]))
def test_run_killed_during_rewind_rewinds_to_same_step(dataset: Path, tmp_path: Path, place: str) -> None:
    """With the state gone back to not yet saved again, or saved and the line that was given up still there."""
    spec = make_spec(dataset, *REWIND)
    run_on(spec, tmp_path / "straight", bad=BAD)
    trainer = see_data(Trainer(spec, tmp_path / "run", quiet=True), as_it_is, BAD)

    def die(*_: Any) -> None:
        raise Crash

    if place == "save":
        skip_data = bad_step_recovery.skip_data
        patch = mock.patch.object(bad_step_recovery, "skip_data", lambda *args: (skip_data(*args), die()))
    else:
        patch = mock.patch.object(bad_step_recovery, "delete_after", die)
    with patch, pytest.raises(Crash):
        trainer.run()
    assert checkpoint.step_of(checkpoint.committed(tmp_path / "run" / "checkpoints")[0]) == 12
    assert same(go_on(tmp_path / "run", BAD), tmp_path / "straight")


@pytest.mark.slow
def test_rewind_waits_for_pending_save(dataset: Path, tmp_path: Path) -> None:
    """Step 12 is still being written when step 13 goes back to step 8."""
    spec = make_spec(dataset, *REWIND)
    run_on(spec, tmp_path / "run", bad=BAD)
    run_on(make_spec(dataset, *REWIND, "checkpoint.asynchronous=true"), tmp_path / "later", bad=BAD)
    assert same(tmp_path / "later", tmp_path / "run")
    kinds = [(e["kind"], e["step"]) for e in RunFolder(tmp_path / "later").events() if e["kind"] in ("save", "rewind")]
    assert kinds[:5] == [("save", 4), ("save", 8), ("save", 12), ("rewind", 13), ("save", 8)]


def test_rewind_without_old_checkpoint_fails(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *REWIND, "health.rewind_steps=10")
    with pytest.raises(TrainingError, match=r"step 13: loss .* no checkpoint of step 3 or before"):
        run_on(spec, tmp_path / "run", bad=BAD)


def test_lowered_lr_holds_for_its_steps_and_survives_resume(dataset: Path, tmp_path: Path, clean: Path) -> None:
    spec = make_spec(dataset, *WATCH, "health.spike_loss=lower_lr", "health.lr_factor=0.25", "health.lr_steps=3")
    run_on(spec, tmp_path / "run", bad=BAD)
    rates = [line[2] for line in curve(tmp_path / "run")]
    usual = [line[2] for line in curve(clean)]
    assert rates == [rate * (0.25 if 13 <= step <= 15 else 1) for step, rate in enumerate(usual, 1)]
    (lowered,) = events(tmp_path / "run", "lower_lr")
    assert (lowered["step"], lowered["factor"], lowered["until"]) == (13, 0.25, 15)
    run_on(spec, tmp_path / "killed", bad=BAD, die_at=15)
    assert same(go_on(tmp_path / "killed", BAD), tmp_path / "run")


# --- not finite ----------------------------------------------------------------------------------------

MODULE = "blocks.1.mlp.up"


def broken(
    dataset: Path, folder: Path, *overrides: str, at: tuple[int, ...] = (BAD,), times: int = 1_000_000
) -> Trainer:
    """A run in which a module gives a NaN at some cursors, for the first `times` that it is asked."""
    trainer = Trainer(make_spec(dataset, *WATCH, "model.layers=3", *overrides), folder, quiet=True)
    asked = []

    def when() -> bool:
        if trainer.cursor in at:
            asked.append(trainer.cursor)
        return trainer.cursor in at and len(asked) <= times

    before_step(trainer, 1, lambda: spoil_output(trainer, MODULE, when))
    return trainer


def test_first_nonfinite_module_is_named(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=f"step 13: loss nan, first in the output of {MODULE};.*--cursor {BAD}"):
        broken(dataset, tmp_path / "run").run()
    (fault,) = events(tmp_path / "run", "fault")
    assert (fault["module"], fault["parameter"], fault["transient"], fault["action"]) == (MODULE, None, False, "stop")
    assert fault["data"]["samples"] == [48, 51]


def test_nonfinite_between_modules_names_enclosing_module(dataset: Path, tmp_path: Path) -> None:
    trainer = Trainer(make_spec(dataset, *WATCH), tmp_path / "run", quiet=True)

    def overflow() -> None:
        attention = trainer.model.blocks["0"].attention
        for name in ("q", "k"):  # each is finite, and their product is not
            getattr(attention, name).weight.data.mul_(1e25)

    before_step(trainer, 3, overflow)
    with pytest.raises(TrainingError, match=r"step 3: loss nan, first in the output of blocks\.0\.attention;"):
        trainer.run()


def test_rerun_recovers_from_transient_fault(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the rerun is finite, so the hardware failed"):
        broken(dataset, tmp_path / "stopped", times=2).run()  # one a micro-batch
    assert events(tmp_path / "stopped", "fault")[0]["transient"] is True
    broken(dataset, tmp_path / "clean", at=()).run()
    broken(dataset, tmp_path / "run", "health.rerun=true", times=2).run()
    assert same(tmp_path / "run", tmp_path / "clean")
    (again,) = events(tmp_path / "run", "rerun")
    assert (again["step"], again["transient"], again["same_bits"], again["reason"]) == (13, True, False, "nonfinite")
    assert events(tmp_path / "run", "fault") == []


def test_persistent_fault_is_distinguished_from_transient(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="step 13: loss nan"):
        broken(dataset, tmp_path / "run", "health.rerun=true").run()
    (again,) = events(tmp_path / "run", "rerun")
    assert (again["transient"], again["same_bits"]) == (False, True)
    spec = make_spec(dataset, *WATCH, "health.rerun=true")
    run_on(spec, tmp_path / "spike", bad=BAD)  # the batch is bad, however often it is computed
    assert [(e["transient"], e["same_bits"]) for e in events(tmp_path / "spike", "rerun")] == [(False, True)]


def test_actions_are_limited(dataset: Path, tmp_path: Path) -> None:
    trainer = broken(dataset, tmp_path / "run", "health.nonfinite=skip", at=tuple(range(BAD, 99)))
    with pytest.raises(TrainingError, match=r"skip did not help 3 times within 8 steps"):
        trainer.run()
    assert [event["from_cursor"] for event in events(tmp_path / "run", "skip")] == [12, 13, 14]
    assert [event["cursor"] for event in events(tmp_path / "run", "fault")] == [12, 13, 14, 15]


@pytest.mark.slow
def test_second_rewind_goes_no_further_back(dataset: Path, tmp_path: Path) -> None:
    """Two bad windows in a row: to step 8, and to step 8 again, though that is fewer than two steps back."""
    rewinding = ("health.nonfinite=rewind", "checkpoint.every=4")
    broken(dataset, tmp_path / "run", *rewinding, at=(BAD, BAD + 1)).run()
    see_data(broken(dataset, tmp_path / "without", at=()), lambda cursor: cursor + (6 if cursor >= 8 else 0)).run()
    assert same(tmp_path / "run", tmp_path / "without")
    assert [event["to_step"] for event in events(tmp_path / "run", "rewind")] == [8, 8]
    assert [(e["from_cursor"], e["to_cursor"]) for e in events(tmp_path / "run", "skip")] == [(8, 13), (13, 14)]


def test_fp16_overflow_count_survives_resume(dataset: Path, tmp_path: Path) -> None:
    fp16 = ("precision.dtype=fp16", "precision.loss_scale=16777216", "checkpoint.every=4", "optim.steps=10")
    train(make_spec(dataset, *fp16), tmp_path / "run")
    lines = read_metrics(RunFolder(tmp_path / "run").metrics_path)
    told = [event["step"] for event in events(tmp_path / "run", "overflow")]
    assert [line["overflows"] for line in lines] == [sum(step <= n for step in told) for n in range(1, 11)]
    run_on(make_spec(dataset, *fp16), tmp_path / "killed", die_at=7)
    resume(tmp_path / "killed")
    again = read_metrics(RunFolder(tmp_path / "killed").metrics_path)
    assert [line["overflows"] for line in again] == [line["overflows"] for line in lines]


# --- the spec ------------------------------------------------------------------------------------------

DEEPSPEED = ("parallel.engine=deepspeed", "parallel.strategy=zero", "parallel.zero=1")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("health.warmup=200",), "health.warmup = 200 is longer than health.window = 128"),
        (("health.nonfinite=log",), "health.nonfinite = 'log' is not one of: lower_lr, skip, rewind, stop"),
        (("health.spike_grad=rewind",), "health.spike_grad = 'rewind' needs checkpoint.every > 0"),
        (("health.hash_every=5",), "health.hash_every = 5 compares copies, and this layout has none"),
        (
            ("health.hash_every=5", "parallel.dp=2", "parallel.strategy=fsdp2"),
            "health.hash_every = 5 compares copies, and this layout has none",
        ),
        (("health.spike_loss=skip", *DEEPSPEED), "health.spike_loss = 'skip' needs parallel.engine"),
        (("health.stats_every=5", *DEEPSPEED), "health.stats_every needs parallel.engine = 'native'"),
    ],
)
def test_invalid_health_options_are_rejected(dataset: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError, match=said.replace("(", r"\(")):
        make_spec(dataset, *overrides)
