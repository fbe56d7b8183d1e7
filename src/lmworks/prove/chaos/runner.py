"""Many trials, some at a time, each in a process of its own that can be ended with all that it started."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from ...spec import TrainingError
from ..corpus import write_corpus
from .draw import Trial
from .trials import Harness, Outcome

LIMIT_S = 2000.0  # for one trial, beyond anything that its own limits allow
IMPORTED = (  # by a rank in the course of its life: imported once here, not once in every rank
    "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "lmworks.cli.main", "lmworks.report.run_report", "lmworks.bench.probe", "lmworks.train",
)  # fmt: skip


@contextmanager
def harness(out: Path) -> Iterator[Harness]:
    """Works in `out`, where the folders of trials that failed are left."""
    for name in IMPORTED:
        importlib.import_module(name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-data-", dir=out) as made:
        yield Harness(out / "trials", write_corpus(Path(made), documents=300))
    with contextlib.suppress(OSError):  # of a trial that failed something is there
        (out / "trials").rmdir()


def run_trials(harness: Harness, trials: list[Trial], jobs: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """In the order of their numbers; `tell` hears of each when it is done."""
    needed = {harness.straight_folder(trial): trial for trial in trials}
    for outcome in side_by_side(harness.run_straight, list(needed.values()), jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"a run that nothing happens to does not end well: {outcome}")
    outcomes = []
    for outcome in side_by_side(harness.run, trials, jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"the harness itself failed: {outcome}")
        outcomes.append(outcome)
        tell(outcome)
    return sorted(outcomes, key=lambda outcome: outcome.trial)


def side_by_side(work: Callable[[Trial], Any], trials: list[Trial], jobs: int) -> Iterator[Any]:
    """What `work` returned for each, or the traceback in words, as they end."""
    context = mp.get_context("fork")
    waiting, running = list(trials), dict[Connection, tuple[BaseProcess, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=answer, args=(theirs, work, waiting.pop(0)))
                process.start()
                theirs.close()
                running[ours] = process, time.monotonic() + LIMIT_S
            for end in wait(list(running), 1.0):
                assert isinstance(end, Connection)
                process, _ = running.pop(end)
                yield received(end)
                process.join()
            for end, (process, limit) in list(running.items()):
                if time.monotonic() > limit:
                    del running[end]
                    end_all(process)
                    yield f"a trial took longer than {LIMIT_S:g} s"
    finally:
        for process, _ in running.values():
            end_all(process)


def answer(end: Connection, work: Callable[[Trial], Any], trial: Trial) -> None:
    os.setsid()
    try:
        end.send(work(trial))
    except BaseException:
        end.send(traceback.format_exc())


def received(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return "a trial's own process died"


def end_all(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
