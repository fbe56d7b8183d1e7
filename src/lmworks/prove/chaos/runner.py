"""Many trials, several at a time, each in its own process group that can be killed as a whole."""

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
from .faults import Trial
from .harness import Harness, Outcome

TRIAL_TIMEOUT_S = 2000.0  # of one trial, above the sum of its own timeouts
PRELOADED_MODULES = (  # imported once here, inherited by every forked rank
    "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.checkpoint",
    "lmworks.cli.main", "lmworks.report.run_report", "lmworks.bench.calibrate", "lmworks.train",
)  # fmt: skip


@contextmanager
def open_harness(out: Path) -> Iterator[Harness]:
    """A harness in `out`; folders of failed trials stay there."""
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-data-", dir=out) as made:
        yield Harness(out / "trials", write_corpus(Path(made), documents=300))
    with contextlib.suppress(OSError):  # not empty after a failed trial
        (out / "trials").rmdir()


def run_trials(
    harness: Harness, trials: list[Trial], jobs: int, on_outcome: Callable[[Outcome], None]
) -> list[Outcome]:
    """Outcomes in the order of trial numbers; `on_outcome` is called as each trial ends."""
    needed = {harness.reference_folder(trial): trial for trial in trials}
    for outcome in run_in_processes(harness.run_reference, list(needed.values()), jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"a reference run without faults failed: {outcome}")
    outcomes = []
    for outcome in run_in_processes(harness.run, trials, jobs):
        if isinstance(outcome, str):
            raise TrainingError(f"the harness itself failed: {outcome}")
        outcomes.append(outcome)
        on_outcome(outcome)
    return sorted(outcomes, key=lambda outcome: outcome.trial)


def run_in_processes(work: Callable[[Trial], Any], trials: list[Trial], jobs: int) -> Iterator[Any]:
    """The result of `work` for each trial, or its traceback as text, in order of completion."""
    context = mp.get_context("fork")
    waiting, running = list(trials), dict[Connection, tuple[BaseProcess, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=trial_process, args=(theirs, work, waiting.pop(0)))
                process.start()
                theirs.close()
                running[ours] = process, time.monotonic() + TRIAL_TIMEOUT_S
            for end in wait(list(running), 1.0):
                assert isinstance(end, Connection)
                process, _ = running.pop(end)
                yield receive(end)
                process.join()
            for end, (process, limit) in list(running.items()):
                if time.monotonic() > limit:
                    del running[end]
                    kill_process_group(process)
                    yield f"a trial took longer than {TRIAL_TIMEOUT_S:g} s"
    finally:
        for process, _ in running.values():
            kill_process_group(process)


def trial_process(end: Connection, work: Callable[[Trial], Any], trial: Trial) -> None:
    os.setsid()
    try:
        end.send(work(trial))
    except BaseException:
        end.send(traceback.format_exc())


def receive(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return "a trial's own process died"


def kill_process_group(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
