"""Where a run's time went: logs written by hand with known answers, and a run that was really killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lmworks.diagnose.checkpoint_interval import interval
from lmworks.diagnose.goodput import CAUSES, TimeBreakdown, time_breakdown
from lmworks.record import RunFolder, read_metrics
from lmworks.record.jsonl import LineWriter, read_lines
from lmworks.record.run_summary import summarize
from lmworks.spec import LMWorksError, RunSpec, SpecError
from lmworks.train import Trainer
from tiny import before_step, make_spec, resume

ZERO = datetime(2026, 11, 15, 12, tzinfo=UTC)


class Log:
    """A run folder, written with a clock of its own: `log.event(12.5, "save", 4)` is 12.5 s after noon."""

    def __init__(self, path: Path, every: int = 2) -> None:
        spec = {"model": {"preset": "tiny"}, "optim": {"steps": 100, "warmup": 0}, "checkpoint": {"every": every}}
        self.folder = RunFolder.create(path, RunSpec.from_dict(spec))
        self.attempt = 0

    def event(self, at: float, kind: str, step: int, **fields: Any) -> None:
        if kind in ("start", "resume"):
            self.attempt = fields["attempt"]
        with LineWriter(self.folder.events_path) as lines:
            lines.append({"time": clock(at), "kind": kind, "step": step, **fields})

    def step(self, at: float, step: int, took: float, saved: float = 0.0) -> None:
        """A step whose line is written at `at`."""
        values = {"step_s": took, "checkpoint_s": saved, "tokens": 1000, "loss": 1.0}
        with LineWriter(self.folder.metrics_path) as lines:
            lines.append({"step": step, "attempt": self.attempt, "time": clock(at), **values})

    def time_breakdown(self) -> TimeBreakdown:
        found = time_breakdown(self.folder)
        ends = [0, *(span.end for span in found.spans)]
        assert [span.begin for span in found.spans] == ends[:-1]  # one after another, nothing between, nothing twice
        times = [line["time"] for line in [*self.folder.events(), *read_lines(self.folder.metrics_path)]]
        wall = datetime.fromisoformat(max(times)) - datetime.fromisoformat(min(times))
        assert sum(round(part * 1e6) for part in found.seconds.values()) == wall // timedelta(microseconds=1)
        return found

    def lost(self) -> dict[str, float]:
        return {cause: seconds for cause, seconds in self.time_breakdown().seconds.items() if seconds}


def clock(at: float) -> str:
    return (ZERO + timedelta(seconds=at)).isoformat(timespec="milliseconds")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "run")


def test_a_run_without_trouble(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(5, 1, took=2)  # 3 s to start
    log.step(7.5, 2, took=2)  # 0.5 s of logging
    log.event(8.5, "save", 2, seconds=1.0)
    log.event(14, "eval", 3, seconds=3.0)
    log.step(14, 3, took=2, saved=1)  # save 1, other 0.5, step 2, evaluation 3: its event has the same time
    log.event(16, "save", 3, seconds=1.5)
    log.event(16, "finish", 3)
    assert log.lost() == {"start": 3, "useful": 6, "save": 2.5, "evaluation": 3, "other": 1.5}
    found = log.time_breakdown()
    assert (found.wall_s, found.ettr, found.goodput) == (16, 9 / 16, 3000 / 16)
    (attempt,) = found.attempts
    assert (attempt.from_step, attempt.to_step, attempt.ended, attempt.failed) == (0, 3, "finish", False)


def test_a_killed_run_loses_the_restart_and_the_steps_since_its_save(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.step(2, 2, took=1)
    log.event(2.5, "save", 2, seconds=0.5)
    log.step(3.5, 3, took=1, saved=0.5)
    log.step(4.5, 4, took=1)  # killed half a second later
    log.event(14.25, "refused", 4, path="step-000004", reason="torn")
    log.event(14.5, "resume", 2, attempt=1)
    log.step(16.5, 3, took=1)
    log.step(17.5, 4, took=1)
    log.step(18.5, 5, took=1)
    log.event(18.5, "finish", 5)
    # restart: from the line of step 4, at 4.5, to the beginning of the next step, at 15.5
    assert log.lost() == {"useful": 5, "save": 0.5, "replay": 2, "restart": 11}
    found = log.time_breakdown()
    assert (found.failures, found.tokens) == (1, 5000)
    first, second = found.attempts
    assert (first.ended, first.end, first.to_step) == ("killed", 4_500_000, 4)
    assert (second.from_step, second.to_step, second.begin) == (2, 5, 14_500_000)


def test_steps_that_were_lost_are_lost_before_they_are_taken_again(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    for step in range(1, 6):
        log.step(step, step, took=1)
    log.event(7, "resume", 0, attempt=1)
    log.step(9, 1, took=1)
    assert log.lost() == {"useful": 1, "replay": 5, "restart": 3}


def test_a_step_is_lost_to_a_second_resume_that_goes_further_back(log: Log) -> None:
    """The newest checkpoint can be damaged: step 2 survived the first resume, not the second."""
    log.event(0, "start", 0, attempt=0)
    for step in range(1, 4):
        log.step(step, step, took=1)
    log.event(4, "resume", 2, attempt=1)
    log.step(5, 3, took=1)
    log.event(6, "resume", 1, attempt=2)
    log.step(7, 2, took=1)
    assert log.lost() == {"useful": 2, "replay": 3, "restart": 2}  # 3, then 2 and 3 again
    assert log.time_breakdown().tokens == 2000


def test_a_save_before_the_first_step_of_an_attempt_counts(log: Log) -> None:
    """Also where the last one of the attempt before was counted at its failure."""
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(1.5, "save", 1, seconds=0.5)
    log.event(2, "fail", 1, error="rank 1 was killed by signal 9")
    log.event(3, "resume", 1, attempt=1)
    log.step(6, 2, took=1, saved=0.5)
    assert log.lost() == {"useful": 2, "save": 1, "restart": 3}


def test_a_failure_that_is_told_and_an_agent_that_starts_again(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(1.5, "save", 1, seconds=0.5)
    log.event(4, "fail", 1, error="rank 1 was killed by signal 9")
    log.event(9, "restart", 1, attempt=1, cause="rank 1: signal 9", lost=0)
    log.event(10, "resume", 1, attempt=1)
    log.step(12, 2, took=1)
    assert log.lost() == {"useful": 2, "save": 0.5, "restart": 9.5}
    found = log.time_breakdown()
    assert [(a.number, a.ended, a.error) for a in found.attempts] == [
        (0, "fail", "rank 1 was killed by signal 9"),
        (1, "killed", ""),
    ]


def test_a_stop_that_was_asked_for_is_a_pause(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(2, "save", 1, seconds=1)
    log.event(2, "interrupt", 1, error="asked")
    log.event(3602, "resume", 1, attempt=1)
    log.step(3605, 2, took=1)
    assert log.lost() == {"useful": 2, "save": 1, "pause": 3600, "restart": 2}
    found = log.time_breakdown()
    assert (found.active_s, found.ettr, found.failures) == (5, 0.4, 1)
    log.event(3605, "finish", 2)
    assert log.time_breakdown().failures == 0


def test_a_hang_is_the_time_until_it_was_noticed(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(31, "hang", 2, ranks=[1], cause="absent")
    log.event(32, "fail", 1, error="rank 1 never came")
    log.event(40, "resume", 0, attempt=1)
    log.step(42, 1, took=1)
    assert log.lost() == {"useful": 1, "replay": 1, "hang": 30, "restart": 10}
    first = log.time_breakdown().attempts[0]
    assert (first.ended, first.error, first.failed) == ("hang", "rank 1 never came", True)


def test_a_rewind_takes_steps_back_within_one_attempt(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    for step in range(1, 5):
        log.step(step, step, took=1)
    log.event(6, "rewind", 5, from_step=4, to_step=2, reason="spike_loss")  # 1 s for the bad step, 1 s to load
    log.event(6, "skip", 3, from_cursor=2, to_cursor=5, reason="spike_loss")
    log.event(6.5, "save", 2, seconds=0.5)  # where it goes on
    log.step(7.5, 3, took=1)
    log.step(8.5, 4, took=1)
    assert log.lost() == {"useful": 4, "rewind": 4.5}
    assert len(log.time_breakdown().attempts) == 1


def test_a_batch_that_is_passed_by_takes_no_time(log: Log) -> None:
    """The first after a restart: what came before it was the restart."""
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(5, "resume", 1, attempt=1)
    log.event(6, "skip", 2, from_cursor=1, to_cursor=2, reason="failed twice in step 2")
    log.step(7, 2, took=1)
    assert log.lost() == {"useful": 2, "restart": 5}


def test_skipped_steps(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(1.5, "save", 1, seconds=0.5)
    log.event(3, "skip", 2, from_cursor=1, to_cursor=2, reason="nonfinite", seconds=1.25)  # 0.25 s of logging
    log.step(5, 2, took=1, saved=0.5)  # its line has the save again, which counts once; 1 s of logging
    log.event(5.75, "overflow", 3, loss_scale=2.0, next_scale=1.0)
    log.step(6, 3, took=1)
    assert log.lost() == {"useful": 2, "save": 0.5, "skip": 2.25, "other": 1.25}
    assert log.time_breakdown().tokens == 2000


def test_a_background_save_counts_where_it_stalled(log: Log) -> None:
    """Its event comes when it is written, steps later, and even after a line that tells of the stall."""
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.step(2.25, 2, took=1, saved=0.25)
    log.step(3.25, 3, took=1)
    log.event(3.5, "save", 1, seconds=0.25, write_s=2.0)
    log.step(4.25, 4, took=1)
    log.event(6.25, "save", 4, seconds=2.0, write_s=1.5)  # after the last step it waits
    log.event(6.25, "finish", 4)
    assert log.lost() == {"useful": 4, "save": 2.25}


def test_what_does_not_fit_is_cut_and_a_clock_that_was_set_back_loses_nothing(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=5)  # more than there is
    log.step(0.5, 2, took=1)  # written after it, at an earlier time
    assert log.lost() == {"useful": 1}


def test_a_run_that_has_nothing_to_tell(log: Log) -> None:
    assert time_breakdown(log.folder).to_dict() | {"began": ""} == {
        "began": "",
        "wall_s": 0.0,
        "active_s": 0.0,
        "seconds": dict.fromkeys(CAUSES, 0.0),
        "lost_s": 0.0,
        "ettr": None,
        "goodput_tokens_per_s": None,
        "failures": 0,
    }


def test_steps_without_times_are_refused(log: Log) -> None:
    with LineWriter(log.folder.metrics_path) as lines:
        lines.append({"step": 1, "attempt": 0, "step_s": 1.0})
    with pytest.raises(LMWorksError, match="has steps without a time"):
        time_breakdown(log.folder)


def steady(log: Log, steps: int = 40, at: float = 0.0, first: int = 1) -> float:
    """Steps of 1 s with a save of 0.5 s after every second; returns when the last was written."""
    for step in range(first, first + steps):
        saved = 0.5 if step > first and step % 2 else 0.0
        at += 1 + saved
        log.step(at, step, took=1, saved=saved)
        if step % 2 == 0:
            log.event(at + 0.5, "save", step, seconds=0.5)
    return at


def test_the_best_interval_from_what_was_measured(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    at = steady(log)  # 49.5 s, and the last save 0.5
    log.event(at + 10, "resume", 40, attempt=1)
    log.event(at + 10.5, "interrupt", 40)
    found = interval(log.folder, summarize(log.folder), log.time_breakdown())
    assert found is not None and found.observed
    assert (found.recovery.mtbf_s, found.recovery.stall_s) == (50.0, 0.5)  # one stop; its restart does not count
    assert found.recovery.restart_s == 10.0
    assert found.recovery.write_s == 0  # nothing is written in the background
    assert found.best_steps == 7  # √(2 · 0.5 · 50) = 7.1, by Daly 6.7
    assert found.steps == 2
    assert found.ettr is not None and found.ettr < found.best_ettr
    given = interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=1.0)
    assert given is not None and not given.observed
    assert given.best_steps == 60  # √(2 · 0.5 · 3600)
    with pytest.raises(SpecError, match="--mtbf 0: give hours between two failures"):
        interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=0.0)


def test_the_restart_time_is_the_mean_of_all_restarts(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    at = steady(log) + 0.5
    for attempt, took in enumerate((10, 20, 60), 1):
        log.event(at + took, "resume", 40, attempt=attempt)
        at += took
    log.event(at, "interrupt", 40)
    found = interval(log.folder, summarize(log.folder), log.time_breakdown())
    assert found is not None
    assert found.recovery.restart_s == 30.0
    assert found.recovery.mtbf_s == 50 / 3  # three attempts were killed


def test_time_to_detect_a_failure_is_that_of_hangs(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    at = steady(log) + 0.5
    log.event(at + 30, "hang", 40, ranks=[1], cause="absent")
    log.event(at + 40, "resume", 40, attempt=1)
    log.event(at + 40, "finish", 40)
    found = interval(log.folder, summarize(log.folder), log.time_breakdown())
    assert found is not None and found.recovery.detect_s == 30


def test_a_run_without_a_failure_has_nothing_to_detect(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.event(steady(log) + 0.5, "finish", 40)
    found = interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=1.0)
    assert found is not None and found.recovery.detect_s == 0


def test_to_resume_what_has_finished_is_no_restart(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    at = steady(log)
    log.event(at + 1, "finish", 40)
    before = interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=1.0)
    log.event(at + 60, "resume", 40, attempt=1)
    log.event(at + 60.001, "finish", 40)
    after = interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=1.0)
    assert before is not None and after is not None
    assert after.recovery.restart_s == before.recovery.restart_s


def test_no_advice_without_a_stop_or_a_save(log: Log) -> None:
    log.event(0, "start", 0, attempt=0)
    log.step(1, 1, took=1)
    log.event(1, "interrupt", 1)
    assert interval(log.folder, summarize(log.folder), log.time_breakdown(), mtbf_h=1.0) is None
    log.event(2, "save", 1, seconds=0.1)
    assert interval(log.folder, summarize(log.folder), log.time_breakdown()) is None


def killed_in_step(number: int, data: Path, run_dir: Path) -> None:
    trainer = Trainer(make_spec(data, "checkpoint.every=3", "log.eval_every=4"), run_dir, quiet=True)
    before_step(trainer, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.run()


def test_a_run_that_was_really_killed(dataset: Path, tmp_path: Path) -> None:
    """In its sixth step, after a save at the third: steps 4 and 5 are lost, and all of the time is accounted for."""
    process = multiprocessing.get_context("fork").Process(target=killed_in_step, args=(6, dataset, tmp_path / "run"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    resume(tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    found, events = time_breakdown(folder), folder.events()
    first, second = found.attempts
    assert (first.from_step, first.to_step, first.ended) == (0, 5, "killed")
    assert (second.from_step, second.to_step, second.ended) == (3, 12, "finish")
    lines = read_lines(folder.metrics_path)
    lost = [line for line in lines if line["attempt"] == 0 and line["step"] > 3]
    counted = read_metrics(folder.metrics_path)
    evaluated = [event["seconds"] for event in events if event["kind"] == "eval"]
    seconds = found.seconds
    assert len(counted) == 12 and len(lost) == 2 and len(evaluated) == 4  # 4 twice, 8, 12
    assert found.tokens == 12 * 4 * 32
    # Times of records are in whole milliseconds: that much of a step may be cut off.
    assert seconds["useful"] == pytest.approx(sum(line["step_s"] for line in counted), abs=0.002 * 12)
    assert seconds["replay"] == pytest.approx(sum(line["step_s"] for line in lost) + evaluated[0], abs=0.005)
    assert seconds["evaluation"] == pytest.approx(sum(evaluated[1:]), abs=0.005)
    saves = [event["seconds"] for event in events if event["kind"] == "save"]
    stalls = [line["checkpoint_s"] for line in lines if line["checkpoint_s"]]  # a save, and all that is around it
    assert all(inner < outer + 0.001 for inner, outer in zip(saves[:-1], stalls, strict=True))
    assert seconds["save"] == pytest.approx(sum(stalls) + saves[-1], abs=0.01)  # no step tells of the last
    resumed = next(event for event in events if event["kind"] == "resume")
    down = datetime.fromisoformat(resumed["time"]) - datetime.fromisoformat(lost[-1]["time"])
    assert seconds["restart"] > down.total_seconds() - 0.001
    assert sum(seconds.values()) == pytest.approx(found.wall_s, abs=1e-9)
    advice = interval(folder, summarize(folder), found)
    assert advice is not None and advice.steps == 3 and advice.best_steps >= 1
