"""`until`: a run pauses with a checkpoint and an evaluation, and goes on bitwise as if it had not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from lmworks.record import RunFolder, read_metrics
from lmworks.record.run_summary import summarize
from lmworks.train import Trainer
from lmworks.train.evaluate import Evaluation
from lmworks.train.signals import Interrupted
from tiny import make_spec

TIMED = {"time", "attempt", "data_s", "forward_backward_s", "optimizer_s", "step_s", "checkpoint_s", "tokens_per_s"}
MEASURED = TIMED | {"model_tflops", "mfu", "memory_bytes"}


def figures(path: Path, leave: frozenset[str] = frozenset()) -> list[dict[str, object]]:
    lines = read_metrics(RunFolder(path).metrics_path)
    return [{key: value for key, value in line.items() if key not in MEASURED | leave} for line in lines]


def test_a_paused_run_goes_on_bitwise(tmp_path: Path, dataset: Path) -> None:
    spec = make_spec(dataset, "optim.schedule=cosine")
    whole = Trainer(spec, tmp_path / "whole", quiet=True)
    whole.run()
    paused = Trainer(spec, tmp_path / "paused", quiet=True)
    paused.until = 5
    at_five = paused.run()
    assert summarize(paused.folder).status == "paused"
    assert figures(paused.folder.path)[-1]["step"] == 5 and figures(paused.folder.path)[-1]["val_loss"] == at_five.loss
    again = Trainer.resume(paused.folder.path, quiet=True)
    again.until = 5  # it has come there already
    assert again.run().loss == at_five.loss and again.step == 5
    for until in (9, None):
        resumed = Trainer.resume(paused.folder.path, quiet=True)
        resumed.until = until
        resumed.run()
    assert summarize(paused.folder).status == "finished"
    leave = frozenset({"val_loss"})  # pauses evaluate
    assert figures(paused.folder.path, leave) == figures(whole.folder.path, leave)
    assert figures(paused.folder.path)[-1] == figures(whole.folder.path)[-1]


def test_a_run_that_was_stopped_where_it_was_to_pause_has_paused(tmp_path: Path, dataset: Path) -> None:
    """A worker that is killed takes its trial with it: at any step, so also at the last one before the pause."""

    class Stopped(Trainer):
        def evaluate(self) -> Evaluation:
            self.stop_signal = signal.SIGTERM
            return super().evaluate()

    run = Stopped(make_spec(dataset), tmp_path / "run", quiet=True)
    run.until = 5
    with pytest.raises(Interrupted):
        run.run()
    assert summarize(run.folder).status == "interrupted" and run.step == 5
    for _ in range(2):
        again = Trainer.resume(run.folder.path, quiet=True)
        again.until = 5
        again.run()
    assert summarize(run.folder).status == "paused"
    assert [event["step"] for event in run.folder.events() if event["kind"] == "pause"] == [5]


def test_a_pause_beyond_the_last_step_finishes(tmp_path: Path, dataset: Path) -> None:
    run = Trainer(make_spec(dataset, "optim.steps=2"), tmp_path / "run", quiet=True)
    run.until = 10
    run.run()
    assert summarize(run.folder).status == "finished" and run.step == 2
