"""How long a call takes, on a machine that others may be using.

Of every run two times are known: by the wall, and alone, what it would have taken by itself. On a CPU that is the
processor time that it was given: where other processes take the cores, the wall goes on and this does not. Threads spin
while they wait for one that was put aside, and that counts too; so where runs are slow, some more are made on one
thread, which waits for nobody: all threads together take no longer than it, and no less than their share of it. A GPU's
own time has no such part: there the fastest run stands for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..data.progress import Progress, silent

LAUNCHING = 2_000_000  # cycles that a GPU spends idly while the host launches: about a millisecond
RUNS = 6  # of one point, the first of them to warm up
FEWEST, LATE = 3, 4  # of one that has taken so many times its share of the time
MORE_RUNS = 4  # of one whose runs spread, the first of them to warm up
USUAL = 1.2  # a usual run of a quiet machine over the best one, at most


@dataclass(frozen=True)
class Run:
    wall: float  # seconds
    alone: float  # of these, what the call itself took


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: left alone, and as it usually went while it was measured."""

    alone: float
    usual: float

    @classmethod
    def of(cls, runs: Sequence[Run], single: Sequence[Run] = (), threads: int = 1) -> Timing:
        """The median, as a training step gets what is usual and not what is best; but no more of it than a quiet
        machine would add to the best run. `single`: further runs, on one thread."""
        usual, best = statistics.median(run.wall for run in runs), min(run.alone for run in runs)
        if single:
            whole = min(run.alone for run in single)
            best = min(max(best, whole / threads), whole)
        return cls(min(usual, USUAL * best), usual)

    @property
    def quiet(self) -> bool:
        return self.usual <= self.alone


class Clock:
    """Times calls: five runs after a warm-up, more within a share of the time there is, and some more if they spread.

    Before each run other memory is written: in training, too, an op finds its operands where the ops in between have
    pushed them. A GPU is kept busy while the host launches what is measured: the time is the device's.
    """

    def __init__(self, device: torch.device, patience: float, progress: Progress = silent) -> None:
        self.device, self.patience, self.progress = device, patience, progress
        self.others = torch.zeros(2**23 if device.type == "cpu" else 2**25, device=device)
        self.timings: list[Timing] = []

    @property
    def noise(self) -> float:
        """All that was timed, over what it takes alone: 1 on a quiet machine. Long calls weigh as they do in a step."""
        alone = sum(timing.alone for timing in self.timings)
        return sum(timing.usual for timing in self.timings) / alone if alone else 1.0

    def begin(self, stage: str, seconds: float, points: int) -> None:
        self.stage, self.points, self.done = stage, points, 0
        self.share, self.deadline = seconds / points, time.perf_counter() + self.patience * seconds

    def has_time(self, expected_s: float) -> bool:
        """False for what is so slow here that it would take more than what is left."""
        return time.perf_counter() + RUNS * expected_s < self.deadline

    def once(self, work: Callable[[], object]) -> Run:
        self.others.add_(1)
        if self.device.type == "cpu":
            return by_processor(work)
        torch.cuda._sleep(LAUNCHING)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        seconds = first.elapsed_time(last) / 1e3
        return Run(seconds, seconds)

    def by_host(self, work: Callable[[], object]) -> Run:
        """Until the host is done, whatever the device still does."""
        run = by_processor(work)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return run

    def __call__(self, work: Callable[[], object], by_host: bool = False) -> float:
        """Seconds of one call of a machine that is left alone."""
        run = self.by_host if by_host else self.once
        began = time.perf_counter()
        run(work)
        runs: list[Run] = []
        while len(runs) < FEWEST or time.perf_counter() < began + self.share * (1 if len(runs) >= RUNS - 1 else LATE):
            runs.append(run(work))
        timing = Timing.of(runs)
        if not timing.quiet and time.perf_counter() < self.deadline:
            timing = self.again(work, run, runs)
        self.timings.append(timing)
        self.done += 1
        self.progress(self.stage, min(self.done, self.points), self.points)
        return timing.alone

    def again(self, work: Callable[[], object], run: Callable[[Callable[[], object]], Run], runs: list[Run]) -> Timing:
        """Runs spread: some more of them, on a CPU on one thread."""
        if self.device.type == "cuda":
            return Timing.of([*runs, *(run(work) for _ in range(MORE_RUNS))])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            _, *single = (run(work) for _ in range(MORE_RUNS))
        finally:
            torch.set_num_threads(threads)
        return Timing.of(runs, single, threads)


def by_processor(work: Callable[[], object]) -> Run:
    """The caller's own processor time, or an equal share of all threads' where it waited for others to finish."""
    wall, own, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
    work()
    wall, own = time.perf_counter() - wall, time.thread_time() - own
    shared = (time.process_time() - all_threads) / torch.get_num_threads()
    return Run(wall, min(wall, max(own, shared)))
