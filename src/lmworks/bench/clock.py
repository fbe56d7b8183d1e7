"""Timing of calls on a machine that may be shared.

Every run has two times: wall time, and isolated time, an estimate of its duration on an idle machine. On a CPU that is
its processor time: while other processes hold the cores, only wall time advances. Threads that spin while they wait for
a descheduled one consume processor time too, so slow calls are run again on one thread: with all threads a call takes
at most that long, and at least its share of it. GPU times have no such part: the fastest run counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..data.progress import Progress, silent

SPIN_CYCLES = 2_000_000  # that a GPU spins while the host launches: about a millisecond
RUNS = 6  # of one point, the first for warm-up
MIN_RUNS, OVERRUN_SHARES = 3, 4  # runs of a point that has taken 4 times its share of the time
EXTRA_RUNS = 4  # of a point with a large variance, the first for warm-up
MAX_TYPICAL = 1.2  # ratio of a typical to the best run on an idle machine, at most


@dataclass(frozen=True)
class Run:
    wall: float  # seconds
    isolated: float  # the part that the call itself took


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: isolated, and typical during the measurement."""

    isolated: float
    typical: float

    @classmethod
    def of(cls, runs: Sequence[Run], single: Sequence[Run] = (), threads: int = 1) -> Timing:
        """The median, because a training step gets typical and not best times; bounded by what an idle machine adds to
        the best run. `single`: further runs on one thread."""
        typical, best = statistics.median(run.wall for run in runs), min(run.isolated for run in runs)
        if single:
            whole = min(run.isolated for run in single)
            best = min(max(best, whole / threads), whole)
        return cls(min(typical, MAX_TYPICAL * best), typical)

    @property
    def quiet(self) -> bool:
        return self.typical <= self.isolated


class Clock:
    """Times calls: five runs after a warm-up, more while the point's share of the time lasts, more if they vary.

    Caches are flushed before each run by writing other memory, as the ops between two uses do in training. A GPU spins
    while the host launches the call, so that device time is measured.
    """

    def __init__(self, device: torch.device, max_overrun: float, progress: Progress = silent) -> None:
        self.device, self.max_overrun, self.progress = device, max_overrun, progress
        self.flush_buffer = torch.zeros(2**23 if device.type == "cpu" else 2**25, device=device)
        self.timings: list[Timing] = []

    @property
    def noise(self) -> float:
        """Total typical time over total isolated time: 1 on an idle machine. Long calls weigh more, as in a step."""
        isolated = sum(timing.isolated for timing in self.timings)
        return sum(timing.typical for timing in self.timings) / isolated if isolated else 1.0

    def begin(self, stage: str, seconds: float, points: int) -> None:
        self.stage, self.points, self.done = stage, points, 0
        self.share, self.deadline = seconds / points, time.perf_counter() + self.max_overrun * seconds

    def has_time(self, expected_s: float) -> bool:
        """Whether a call of this duration fits in the time left."""
        return time.perf_counter() + RUNS * expected_s < self.deadline

    def time_once(self, work: Callable[[], object]) -> Run:
        self.flush_buffer.add_(1)
        if self.device.type == "cpu":
            return cpu_timed(work)
        torch.cuda._sleep(SPIN_CYCLES)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        seconds = first.elapsed_time(last) / 1e3
        return Run(seconds, seconds)

    def host_time(self, work: Callable[[], object]) -> Run:
        """Host time: the device may still be busy."""
        run = cpu_timed(work)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return run

    def __call__(self, work: Callable[[], object], host_time: bool = False) -> float:
        """Isolated seconds of one call."""
        run = self.host_time if host_time else self.time_once
        began = time.perf_counter()
        run(work)
        runs: list[Run] = []
        while len(runs) < MIN_RUNS or time.perf_counter() < began + self.share * (
            1 if len(runs) >= RUNS - 1 else OVERRUN_SHARES
        ):
            runs.append(run(work))
        timing = Timing.of(runs)
        if not timing.quiet and time.perf_counter() < self.deadline:
            timing = self.remeasure(work, run, runs)
        self.timings.append(timing)
        self.done += 1
        self.progress(self.stage, min(self.done, self.points), self.points)
        return timing.isolated

    def remeasure(
        self, work: Callable[[], object], run: Callable[[Callable[[], object]], Run], runs: list[Run]
    ) -> Timing:
        """More runs of a call with a large variance; on a CPU, on one thread."""
        if self.device.type == "cuda":
            return Timing.of([*runs, *(run(work) for _ in range(EXTRA_RUNS))])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            _, *single = (run(work) for _ in range(EXTRA_RUNS))
        finally:
            torch.set_num_threads(threads)
        return Timing.of(runs, single, threads)


def cpu_timed(work: Callable[[], object]) -> Run:
    """Processor time of the calling thread, or an equal share of all threads' time if that is more."""
    wall, own, all_threads = time.perf_counter(), time.thread_time(), time.process_time()
    work()
    wall, own = time.perf_counter() - wall, time.thread_time() - own
    shared = (time.process_time() - all_threads) / torch.get_num_threads()
    return Run(wall, min(wall, max(own, shared)))
