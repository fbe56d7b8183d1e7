"""A slow rank is named, once, though every rank's steps take equally long; it is told when it keeps up again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.world import init_distributed
from lmworks.record import RunFolder, phase
from lmworks.spec import Grid, ParallelSpec, WatchSpec
from lmworks.train.watch import Skew, run_watchdog
from lmworks.train.watch.watchdog import Straggler, stages
from tiny import events

SPEC = WatchSpec(straggler=1.5, straggler_steps=3)


def test_straggler_is_reported_once_after_consecutive_steps() -> None:
    skew = Skew(SPEC, [[0, 1, 2, 3]])
    slow, well = [0.4, 0.9, 0.5, 0.5], [0.5, 0.6, 0.5, 0.5]
    assert [skew.update(busy) for busy in (slow, slow, well, slow, slow)] == [[]] * 5
    assert skew.update(slow) == [Straggler(1, 1.8, recovered=False)]
    assert skew.largest == pytest.approx(1.8)
    assert [skew.update(busy) for busy in (slow, slow, slow, slow, well, well, slow, well, well)] == [[]] * 9
    assert skew.update(well) == [Straggler(1, 1.2, recovered=True)]


def test_two_ranks_compare_with_each_other_above_minimal_share() -> None:
    skew = Skew(SPEC, [[0, 1]])
    assert [skew.update([0.1, 0.4]) for _ in range(5)] == [[]] * 5  # both wait, for the network
    assert [skew.update([0.3, 0.9]) for _ in range(3)][-1] == [Straggler(1, 3.0, recovered=False)]


def test_pipeline_stages_are_not_compared() -> None:
    assert stages(Grid.of(ParallelSpec(pp=2, dp=2))) == [[0, 1], [2, 3]]
    skew = Skew(SPEC, [[0, 1], [2, 3], [4]])
    busy = [0.3, 0.3, 0.9, 0.9, 1.0]
    assert [skew.update(busy) for _ in range(5)] == [[]] * 5
    assert skew.largest == pytest.approx(1.0)


def told_of(rank: int, run: Path) -> list[dict[str, Any]]:
    """Of the other one a busy machine may say so, too."""
    return [event for event in events(run, "straggler") if event["rank"] == rank]


def be_slow_for_a_while(rank: int, run: Path) -> int:
    """Until rank 1 was named, then until it was told well again; every step ends with what all ranks have in common."""
    mesh = init_distributed(ParallelSpec(dp=2), torch.device("cpu"))
    step = 0
    with run_watchdog(SPEC, RunFolder(run), 0, mesh) as watchdog:
        assert watchdog is not None
        for wanted in (1, 2):
            told = 0
            while told < wanted and step < 2000:
                step += 1
                phase.enter("forward", step)
                time.sleep(0.08 if rank == 1 and wanted == 1 else 0.01)  # as work does: not in a collective
                figures = torch.zeros(2)
                figures[rank] = watchdog.busy
                dist.all_reduce(figures)
                watchdog.compare(figures.tolist(), step)
                count = torch.tensor(len(told_of(1, run)) if rank == 0 else 0)
                dist.broadcast(count, src=0)
                told = int(count)
    return step


def test_straggler_and_recovery_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lmworks.train.watch.watchdog.WINDOW", 20)
    on_ranks(2, be_slow_for_a_while, tmp_path)
    named, well = told_of(1, tmp_path)
    assert (named["recovered"], well["recovered"]) == (False, True)
    assert named["ratio"] > 1.5 and named["host"] and named["step"] < well["step"]
    assert f"step {named['step']}: rank 1 on {named['host']} is slow: busy" in capfd.readouterr().err
