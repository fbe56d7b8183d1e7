"""Starting again by itself: what is recorded, when it gives up, what it passes by, and on how many ranks it goes on."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layouts import layout, with_meshes
from lmworks.data import Batch, Batches
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import MetricsWriter, RunFolder
from lmworks.record.folder import NO_ERROR_MESSAGE, Attempt, attempts, crashed_twice
from lmworks.spec import RunSpec, SpecError
from lmworks.train import Trainer, restart
from lmworks.train.restart import CrashLoop, is_restart
from tiny import Crash, before_step, crash, curve, differences, events, make_spec, saved, train

SPEC = ("checkpoint.every=2", "checkpoint.keep=0", "optim.steps=8")
KILLED = "rank 0 was ended by SIGKILL"


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LMWORKS_RESTARTS", "LMWORKS_RESTART_CAUSE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def started_again(monkeypatch: pytest.MonkeyPatch, count: int, cause: str = KILLED, launch: str = "L1") -> None:
    """As `lmworks train --max-restarts` tells the ranks of its generation `count`."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    monkeypatch.setenv("LMWORKS_RESTARTS", str(count))
    monkeypatch.setenv("LMWORKS_RESTART_CAUSE", cause)


def dies(trainer: Trainer, step: int) -> None:
    """As by kill -9: nothing is recorded of it."""
    trainer.record_failure = lambda error: None  # type: ignore[method-assign]
    before_step(trainer, step, crash)
    with pytest.raises(Crash):
        trainer.run()


def cursors_of(trainer: Trainer) -> list[int]:
    """Run to the end; the cursor of every step that was taken."""
    taken, step = [], trainer.train_step

    def noting(batches: Sequence[Batch]) -> dict[str, Any]:
        taken.append(trainer.cursor)
        return step(batches)

    trainer.train_step = noting  # type: ignore[method-assign]
    trainer.run()
    return taken


# --- what the records say ------------------------------------------------------------------------------


def test_attempts_are_read_from_records(dataset: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", make_spec(dataset))
    folder.event("start", 0, attempt=0, launch="L1")
    for attempt, steps in ((0, (1, 2, 3)), (1, (3, 4, 2, 3))):  # the second one went back by itself
        with MetricsWriter(folder.metrics_path, attempt) as lines:
            for step in steps:
                lines.write(step, {"loss": 1.0})
    folder.event("restart", 2, attempt=1, launch="L1", cause=KILLED, lost=1)
    folder.event("resume", 2, attempt=1, launch="L1")
    folder.event("fail", 3, error="another rank ended without an error message")
    folder.event("fail", 3, error="rank 1 was ended by SIGKILL")  # its agent, which knows more
    folder.event("restart", 2, attempt=2, launch="L1")  # died before it had loaded anything
    folder.event("resume", 2, attempt=3)
    folder.event("interrupt", 5, error="stopped by SIGTERM")
    assert attempts(folder) == [
        Attempt(0, 3, "L1", cause=NO_ERROR_MESSAGE),
        Attempt(1, 3, "L1", cause="rank 1 was ended by SIGKILL"),
        Attempt(2, 2, "L1", cause=NO_ERROR_MESSAGE),
        Attempt(3, 2, "", done=True),
    ]


@pytest.mark.parametrize(
    ("past", "step"),
    [
        ([Attempt(0, 6), Attempt(1, 6)], 7),
        ([Attempt(0, 6), Attempt(1, 5), Attempt(2, 6)], 0),
        ([Attempt(0, 6), Attempt(1, 6, done=True)], 0),
        ([Attempt(0, 6, done=True), Attempt(1, 6, done=True)], 0),
        ([Attempt(0, 6)], 0),
        ([], 0),
    ],
)
def test_crash_loop_is_two_failures_in_one_step(past: list[Attempt], step: int) -> None:
    assert crashed_twice(past) == step


def test_restart_event_has_cause_and_lost_steps(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, spec = tmp_path / "run", make_spec(dataset, *SPEC)
    dies(Trainer(spec, run, quiet=True), 6)
    started_again(monkeypatch, 1)
    Trainer.resume(run, quiet=True).run()
    (event,) = events(run, "restart")
    del event["time"]
    assert event == {
        "kind": "restart", "step": 4, "attempt": 1, "launch": "L1", "restarts": 1, "cause": KILLED, "lost": 1,
    }  # fmt: skip
    train(spec, tmp_path / "straight")
    assert curve(run) == curve(tmp_path / "straight")
    assert differences(saved(run), saved(tmp_path / "straight")) == []


def test_torchrun_restart_cause_comes_from_records(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make_spec(dataset, *SPEC), tmp_path / "run", quiet=True)
    before_step(trainer, 4, crash)
    with pytest.raises(Crash):
        trainer.run()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    Trainer.resume(tmp_path / "run", quiet=True).run()
    assert [(event["cause"], event["lost"]) for event in events(tmp_path / "run", "restart")] == [(NO_ERROR_MESSAGE, 1)]


# --- crash loops ---------------------------------------------------------------------------------------


def died_twice(dataset: Path, run: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "L1")
    dies(Trainer(make_spec(dataset, *SPEC, *overrides), run, quiet=True), 6)
    started_again(monkeypatch, 1)
    dies(Trainer.resume(run, quiet=True), 6)


def test_crash_loop_ends_run_with_cause(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    died_twice(dataset, run, monkeypatch)
    for count in (2, 3):  # torchrun starts it over all the same
        started_again(monkeypatch, count)
        with pytest.raises(CrashLoop, match=f"step 6 failed twice: {KILLED}; not restarted") as caught:
            Trainer.resume(run, quiet=True).run()
        assert caught.value.final and caught.value.exit_code == 1
    assert len(events(run, "restart")) == 1
    monkeypatch.delenv("LMWORKS_RESTARTS")  # somebody has mended it
    assert cursors_of(Trainer.resume(run, quiet=True)) == [4, 5, 6, 7]


def test_failures_of_other_agents_are_not_counted(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died_twice(dataset, tmp_path / "run", monkeypatch)
    started_again(monkeypatch, 2, launch="L2")
    assert cursors_of(Trainer.resume(tmp_path / "run", quiet=True)) == [4, 5, 6, 7]


def test_crash_loop_skip_persists(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    died_twice(dataset, run, monkeypatch, "fault.crash_loop=skip")
    started_again(monkeypatch, 2)
    dies(Trainer.resume(run, quiet=True), 7)  # past step 6, which had cursor 5; saved at step 6
    for folder in (run / "checkpoints").glob("step-000006*"):
        folder.rename(folder.with_name("gone"))
    monkeypatch.delenv("LMWORKS_RESTARTS")
    assert cursors_of(Trainer.resume(run, quiet=True)) == [4, 6, 7, 8]
    passed = [(event["step"], event["from_cursor"], event["to_cursor"]) for event in events(run, "skip")]
    assert passed == [(6, 5, 6)] * 2
    assert events(run, "skip")[0]["reason"] == "failed twice in step 6"


# --- who takes what up ---------------------------------------------------------------------------------


def test_restarted_ranks_resume_only_their_run(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not is_restart(folder)  # the first generation died before it had made one
    RunFolder.create(folder.path, make_spec(dataset))
    assert is_restart(folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not is_restart(folder)
    folder.event("start", 0, attempt=0, launch="job-7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert is_restart(folder)  # nodes came or went, which torchrun does not count
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    assert not is_restart(folder)
    folder.event("resume", 0, attempt=1, launch="")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not is_restart(folder)


def keep(path: Path, has: Any, until: Any) -> None:
    with RunFolder(path).locked():
        has.set()
        until.wait()


def test_restart_waits_for_lock_of_ending_rank(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    folder = RunFolder.create(tmp_path / "run", make_spec(dataset, "optim.steps=2"))
    has, until = context.Event(), context.Event()
    holder = context.Process(target=keep, args=(folder.path, has, until), daemon=True)
    holder.start()
    has.wait()
    trainer = Trainer.resume(folder.path, quiet=True)
    with pytest.raises(SpecError, match="is in use: another process is training this run"):
        trainer.run()  # by hand: at once
    started_again(monkeypatch, 1)
    look = restart.lock_timeout_s

    def patience() -> float:
        until.set()  # it ends while it is waited for
        return look()

    monkeypatch.setattr("lmworks.train.trainer.lock_timeout_s", patience)
    Trainer.resume(folder.path, quiet=True).run()
    holder.join()
    assert [event["step"] for event in events(folder.path, "finish")] == [2]


# --- fewer ranks ---------------------------------------------------------------------------------------

DP4 = ("parallel.dp=4", "parallel.strategy=fsdp2", "fault.elastic=true", "optim.steps=6", "data.global_batch=8")
Samples = dict[int, list[bytes]]


@with_meshes
def straight_and_killed(rank: int, spec: RunSpec, straight: Path, killed: Path) -> tuple[Samples, Samples]:
    one = samples_of(lambda: Trainer(spec, straight, quiet=True).run())
    other = samples_of(lambda: dies(Trainer(spec, killed, quiet=True), 4))
    return one, other


@with_meshes
def resumed(rank: int, run: Path) -> Samples:
    return samples_of(lambda: Trainer.resume(run, quiet=True).run())


def samples_of(work: Any) -> Samples:
    """Every sequence that this rank trained on, by cursor."""
    found: Samples = {}
    read = Batches.at

    def noting(self: Batches, cursor: int) -> list[Batch]:
        batches = read(self, cursor)
        if self.shuffle:  # not those of held-out data
            found[cursor] = [row.numpy().tobytes() for batch in batches for row in batch.tokens]
        return batches

    Batches.at = noting  # type: ignore[method-assign]
    try:
        work()
    finally:
        Batches.at = read  # type: ignore[method-assign]
    return found


def all_ranks(parts: Sequence[Samples]) -> Samples:
    whole: Samples = defaultdict(list)
    for part in parts:
        for cursor, rows in part.items():
            whole[cursor] += rows
    return {cursor: sorted(rows) for cursor, rows in whole.items()}


def test_elastic_resume_from_four_to_two_ranks(dataset: Path, tmp_path: Path) -> None:
    """No sample is repeated or dropped, and what differs is the order of sums: 1e-6."""
    spec, straight, killed = layout(dataset, *DP4), tmp_path / "straight", tmp_path / "killed"
    both = on_ranks(4, straight_and_killed, spec, straight, killed)
    written = RunFolder(killed).spec_path.read_text()
    after = all_ranks(on_ranks(2, resumed, killed))
    before = all_ranks([part[1] for part in both])
    whole = all_ranks([part[0] for part in both])
    assert sorted(after) == [2, 3, 4, 5] and len(whole[0]) == 8  # from the checkpoint of step 2
    assert {**before, **after} == whole
    assert after[3] == before[3]  # the step that was taken twice had the same samples both times
    for one, other in zip(curve(killed), curve(straight), strict=True):
        assert one[:5] == pytest.approx(other[:5], rel=1e-6), one[0]
    assert RunFolder(killed).spec_path.read_text() == written
    (event,) = events(killed, "resume")
    assert (event["step"], event["ranks"], event["layout"], event["accumulation"]) == (2, 2, {"dp": 2}, 4)
