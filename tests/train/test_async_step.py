"""Passes of the next step are launched before a step is settled, and a run that does so is the run that does not.

A CPU gains nothing by it and does not do it by itself; here it is made to.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from layouts import layout, with_meshes
from lmworks.bench.train import one_step
from lmworks.data import Batch
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder, phase
from lmworks.spec import LMWorksError, RunSpec
from lmworks.train import Trainer, async_step, checkpoint_manager, step, step_scalars, trainer
from lmworks.train.async_step import PassLauncher, is_sync_point, supports_async_step
from lmworks.train.health.bad_step import Health
from lmworks.train.prefetcher import Prefetcher
from lmworks.train.restart import SkippedBatches
from tiny import Crash, before_step, built, crash, curve, differences, events, live, make_spec, saved, train
from unhealthy import WATCH, as_it_is, see_data, spoil_output
from variations import with_slow

BAD = 12  # the window that is bad, and the step it would have been in is 13
CLOCK = ("time", "seconds", "write_s", "hostname")
Prepare = Callable[[Trainer], Any]


def looking(how: bool) -> Any:
    return mock.patch.object(Trainer, "is_async", property(lambda run: how and supports_async_step(run.spec)))


def run_to_end(trainer: Trainer) -> str:
    """What it said where it failed."""
    try:
        trainer.run()
    except (LMWorksError, Crash) as error:
        return str(error).replace(str(trainer.folder.path), "RUN")
    return ""


def told(run_dir: Path) -> list[dict[str, Any]]:
    """Events and statistics, without what depends on the clock or on where the run lies."""
    folder = RunFolder(run_dir)
    paths = [path for path in (folder.events_path, folder.stats_path) if path.exists()]
    lines = [line for path in paths for line in path.read_text().replace(str(run_dir), "RUN").splitlines()]
    return [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]


def ends_alike(spec: RunSpec, folder: Path, prepare: Prepare = lambda _: None) -> Path:
    """Run it both ways, hold all they leave against each other, and return the folder of the one that looked ahead."""
    said = {}
    for how in (False, True):
        with (
            looking(how),
            mock.patch.object(
                PassLauncher, "launch_next", autospec=True, side_effect=PassLauncher.launch_next
            ) as looks,
        ):
            trainer = Trainer(spec, folder / str(how), quiet=True)
            prepare(trainer)
            said[how] = run_to_end(trainer)
        assert looks.called == how
    plain, other = folder / "False", folder / "True"
    assert said[False] == said[True]
    assert curve(plain) == curve(other)
    assert told(plain) == told(other)
    assert differences(saved(plain), saved(other)) == []
    return other


# --- the order -----------------------------------------------------------------------------------------


def ready(spec: RunSpec, folder: Path) -> Trainer:
    trainer = built(spec, folder)
    trainer.prefetcher = Prefetcher(trainer.batches, 0, trainer.device)
    return trainer


def test_next_passes_launch_before_scalars_are_read_and_update_after(dataset: Path, tmp_path: Path) -> None:
    trainer = ready(make_spec(dataset), tmp_path)
    order: list[str] = []

    def noted(owner: Any, name: str, said: Callable[[], str]) -> Any:
        real = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *given: [order.append(said()), real(*given)][1])

    def passes() -> str:
        assert all(shard.leaf.grad is None for shard in trainer.parallel_model.shards)  # nothing is held twice
        return "passes"

    with (
        looking(True),
        noted(trainer, "forward_backward", passes),
        noted(trainer, "optimize", lambda: f"update {trainer.step + 1}"),
        noted(trainer.reader, "finish", lambda: f"read {trainer.step + 1}"),
    ):
        losses = [one_step(trainer, left) for left in (3, 2, 1)]
    assert order[:4] == ["passes", "update 1", "passes", "read 1"]
    assert order[4:] == ["update 2", "passes", "read 2", "update 3", "read 3"]
    assert trainer.launcher.pending is None
    plain = ready(make_spec(dataset), tmp_path / "plain")
    assert losses == [one_step(plain, left) for left in (3, 2, 1)]
    assert differences(live(trainer), live(plain)) == []


def test_phase_is_optimizer_while_host_waits(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step too, after which no batch is to be read: a report of a hang tells what a rank waits for."""
    trainer = ready(make_spec(dataset), tmp_path)
    finish, seen = trainer.reader.finish, []
    monkeypatch.setattr(trainer.reader, "finish", lambda: [seen.append((phase.name, phase.step)), finish()][1])
    with looking(True):
        for left in (3, 2, 1):
            one_step(trainer, left)
    assert seen == [("optimizer", 1), ("optimizer", 2), ("optimizer", 3)]


def test_other_batches_discard_launched_passes(dataset: Path, tmp_path: Path) -> None:
    trainer, plain = ready(make_spec(dataset), tmp_path / "one"), ready(make_spec(dataset), tmp_path / "other")
    with looking(True):
        one_step(trainer, 9)
        assert trainer.launcher.pending is not None
        found = trainer.train_step(trainer.batches.at(7))["loss"]
    one_step(plain, 9)
    assert found == plain.train_step(plain.batches.at(7))["loss"]


def test_sync_points_wait_for_step(dataset: Path) -> None:
    def alone(*overrides: str) -> list[int]:
        spec = make_spec(dataset, *overrides)
        return [number for number in range(1, 13) if is_sync_point(spec, number)]

    assert alone() == []
    assert alone("checkpoint.every=4") == [4, 8, 12]
    assert alone("log.eval_every=5") == [5, 10]
    assert alone("health.stats_every=6") == [5, 6, 11, 12]  # neither into such a step nor out of it


def test_no_early_passes_for_unsupported_specs(dataset: Path) -> None:
    experts = ("model.experts=2", "model.top_k=1", "model.expert_ffn=16")
    assert supports_async_step(make_spec(dataset))
    for overrides in (experts, ("precision.dtype=fp16",), ("parallel.offload=optimizer",)):
        assert not supports_async_step(make_spec(dataset, *overrides))


def test_skipped_batch_is_not_launched() -> None:
    skipped_batches = SkippedBatches({5: "failed twice in step 4"}, step=9)
    assert [skipped_batches.contains(*at) for at in ((4, 5), (9, 20), (8, 20))] == [True, True, False]
    assert skipped_batches.skip_reason(9, 20) and not skipped_batches.contains(9, 21)


# --- the same run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ("checkpoint.every=5", "log.eval_every=4"),
        ("data.document_mask=true", "data.global_batch=2", "health.stats_every=4"),
        ("precision.dtype=bf16", "precision.weights=bf16", "precision.states=bf16"),
        ("optim.optimizer=sgd", "data.workers=1", "optim.clip=0"),
    ],
    ids=["pauses", "documents and statistics", "bf16 weights", "sgd and workers"],
)
def test_async_run_equals_sync_run(overrides: tuple[str, ...], dataset: Path, tmp_path: Path) -> None:
    ends_alike(make_spec(dataset, *overrides), tmp_path)


def test_step_time_includes_its_own_passes_only(dataset: Path, tmp_path: Path) -> None:
    """On a clock that only passes advance. Those after a checkpoint are launched late, by their own step."""
    spec = make_spec(dataset, "checkpoint.every=3", "optim.steps=5", "log.eval_every=0")
    clock = [0.0]
    clock_module = SimpleNamespace(**vars(time) | {"perf_counter": lambda: clock[0]})
    with looking(True), ExitStack() as patches:
        for module in (async_step, checkpoint_manager, step, step_scalars, trainer):  # and of no other thread
            patches.enter_context(mock.patch.object(module, "time", clock_module))
        run = Trainer(spec, tmp_path / "run", quiet=True)
        passes = run.forward_backward

        def timed(*arguments: Any) -> Any:
            clock[0] += 1.0
            return passes(*arguments)

        run.forward_backward = timed  # type: ignore[method-assign]
        run.run()
    rows = [json.loads(line) for line in RunFolder(tmp_path / "run").metrics_path.read_text().splitlines()]
    assert [row["step_s"] for row in rows] == [1.0] * 5


def test_falsely_skipped_update_recomputes_gradients(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "optim.steps=5", "optim.clip=0.1")
    plain = train(spec, tmp_path / "plain")
    with looking(True), mock.patch.object(Health, "limits", lambda _: (-1.0, -1.0)):
        held = train(spec, tmp_path / "held")
    assert differences(live(plain), live(held)) == []
    assert curve(tmp_path / "plain") == curve(tmp_path / "held")


@pytest.mark.parametrize("action", with_slow(["log", "rewind", "lower_lr", "stop"], ["log", "lower_lr"]))
def test_spike_is_handled_like_sync(action: str, dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *WATCH, "optim.steps=16", f"health.spike_loss={action}")
    run = ends_alike(spec, tmp_path, lambda trainer: see_data(trainer, as_it_is, bad=BAD))
    assert (events(run, "spike")[0]["step"], events(run, "spike")[0]["cursor"]) == (13, BAD)


def spoil(trainer: Trainer, cursor: int, times: int) -> None:
    """A module gives a NaN for the batch of `cursor`, in the first `times` micro-batches."""
    read, passes = trainer.batches.at, trainer.forward_backward
    under_way: list[int] = []
    spoilt: list[int] = []

    def at(cursor: int) -> list[Batch]:
        found = read(cursor)
        found[0].tokens.cursor = cursor  # type: ignore[attr-defined]
        return found

    def noting(batches: Any, tokens: int) -> Any:
        under_way[:] = [batches[0].tokens.cursor]
        return passes(batches, tokens)

    def when() -> bool:
        if under_way == [cursor]:
            spoilt.append(cursor)
        return under_way == [cursor] and len(spoilt) <= times

    trainer.batches.at = at  # type: ignore[method-assign]
    trainer.forward_backward = noting  # type: ignore[method-assign]
    before_step(trainer, 1, lambda: spoil_output(trainer, "blocks.0.mlp.up", when))


@pytest.mark.parametrize("action", with_slow(["skip", "rewind", "stop"], ["skip", "stop"]))
def test_nan_is_handled_like_sync(action: str, dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *WATCH, "optim.steps=16", f"health.nonfinite={action}")
    run = ends_alike(spec, tmp_path, lambda trainer: spoil(trainer, BAD, 1_000_000))
    (fault,) = events(run, "fault")
    assert (fault["step"], fault["module"], fault["transient"]) == (13, "blocks.0.mlp.up", False)


def test_transient_fault_is_recorded(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, *WATCH)
    run = ends_alike(spec.replace(health=spec.health.replace(rerun=True)), tmp_path, lambda one: spoil(one, BAD, 2))
    assert [(event["step"], event["transient"]) for event in events(run, "rerun")] == [(13, True)]
    with looking(True):
        trainer = Trainer(spec, tmp_path / "stopped", quiet=True)
        spoil(trainer, BAD, 2)  # one a micro-batch: all that is computed afterwards is right
        assert "the rerun is finite, so the hardware failed" in run_to_end(trainer)
    assert events(tmp_path / "stopped", "fault")[0]["transient"] is True


# --- an end in between ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", with_slow([6, 7], [6]))
def test_failed_launch_is_raised_in_next_step(number: int, dataset: Path, tmp_path: Path) -> None:
    """Step 5 is saved, so that the passes of 6 are not launched ahead, and those of 7 are."""

    def break_at(trainer: Trainer) -> None:
        passes, seen = trainer.forward_backward, []

        def breaking(batches: Any, tokens: int) -> Any:
            seen.append(tokens)
            if len(seen) == number:
                raise LMWorksError("too much")
            return passes(batches, tokens)

        trainer.forward_backward = breaking  # type: ignore[method-assign]

    spec = make_spec(dataset, "checkpoint.every=5")
    run = ends_alike(spec, tmp_path / "both", break_at)
    assert [line[0] for line in curve(run)] == list(range(1, number))
    assert [event["step"] for event in events(run, "fail")] == [number - 1]
    with looking(True):
        Trainer.resume(run, quiet=True).run()
    train(spec, tmp_path / "whole")
    assert differences(saved(run), saved(tmp_path / "whole")) == []
    assert curve(run) == curve(tmp_path / "whole")


def test_unreadable_batch_fails_in_its_step(dataset: Path, tmp_path: Path) -> None:
    def hide(trainer: Trainer) -> None:
        read = trainer.batches.at

        def at(cursor: int) -> list[Batch]:
            if cursor == 7:
                raise LMWorksError("gone")
            return read(cursor)

        trainer.batches.at = at  # type: ignore[method-assign]

    run = ends_alike(make_spec(dataset, "checkpoint.every=5"), tmp_path, hide)
    assert [line[0] for line in curve(run)] == list(range(1, 8))


@pytest.mark.parametrize("number", with_slow([6, 12], [12]))
def test_stopped_run_saves_taken_step(number: int, dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "checkpoint.every=5")
    run = ends_alike(
        spec, tmp_path / "both", lambda one: before_step(one, number, lambda: os.kill(os.getpid(), signal.SIGTERM))
    )
    assert [event["step"] for event in events(run, "save")][-1] == number
    if number < 12:
        with looking(True):
            Trainer.resume(run, quiet=True).run()
    train(spec, tmp_path / "whole")
    assert differences(saved(run), saved(tmp_path / "whole")) == []


def test_killed_run_keeps_settled_steps(dataset: Path, tmp_path: Path) -> None:
    spec = make_spec(dataset, "checkpoint.every=5")
    run = ends_alike(spec, tmp_path / "both", lambda trainer: before_step(trainer, 9, crash))
    assert [line[0] for line in curve(run)] == list(range(1, 9))


# --- several ranks -------------------------------------------------------------------------------------


@with_meshes
def on_each(rank: int, cases: dict[Path, RunSpec], stopped: Path) -> list[str]:
    """All of them both ways, with a bad window; then one in which the second rank is told to stop, and goes on."""
    for folder, spec in cases.items():
        for how in (False, True):
            with looking(how):
                run_to_end(see_data(Trainer(spec, folder / str(how), quiet=True), as_it_is, bad=BAD))
    with looking(True):
        trainer = Trainer(next(iter(cases.values())), stopped, quiet=True)
        if rank == 1:
            before_step(trainer, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        said = [run_to_end(trainer)]
        return [*said, run_to_end(see_data(Trainer.resume(stopped, quiet=True), as_it_is, bad=BAD))]


@pytest.mark.slow  # one rank takes its steps so in all tests above
@pytest.mark.parametrize("names", [["fsdp2"], ["fsdp2", "zero1"]], ids=str)
def test_ranks_launch_early_passes_together(names: list[str], dataset: Path, tmp_path: Path) -> None:
    """A window that is computed again and gone back from, or taken all the same; ZeRO gathers after an update."""
    cases = {
        "fsdp2": ("parallel.dp=2", "parallel.strategy=fsdp2", "health.spike_loss=rewind", "health.rerun=true"),
        "zero1": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1", "health.spike_loss=log"),
    }
    specs = {tmp_path / name: layout(dataset, *WATCH, "optim.steps=16", *cases[name]) for name in names}
    first, second = on_ranks(2, on_each, specs, tmp_path / "stopped")
    assert (
        first == second and "step 7" in first[0]
    )  # told after the passes of 6 were launched, and heard with those of 7
    for folder in specs:
        plain, other = folder / "False", folder / "True"
        assert events(other, "spike")
        assert told(plain) == told(other)
        assert curve(plain) == curve(other)
        assert differences(saved(plain), saved(other)) == []
    assert curve(tmp_path / "stopped") == curve(tmp_path / "fsdp2" / "False")
    assert differences(saved(tmp_path / "stopped"), saved(tmp_path / "fsdp2" / "False")) == []
