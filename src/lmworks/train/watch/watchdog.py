"""The watchdog: a thread in every rank that samples whether the main thread waits for other ranks, and how long.

The main thread may hang in C++, so the watchdog needs no cooperation of it. It samples the position of the main
thread many times a second: that gives the busy share of this rank (`Skew`), and detects timeouts, which `alarm`
handles.
"""

from __future__ import annotations

import faulthandler
import mmap
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from ... import parallel
from ...parallel.mesh import Mesh
from ...parallel.world import run_on_all_ranks
from ...plan.memory.host import oom_kills
from ...record import RunFolder, phase
from ...record.hang import Verdict, find_cause
from ...record.heartbeat import Heartbeat, own_heartbeat, process_state, read_heartbeats, read_stat
from ...spec import Grid, LMWorksError, TrainingError, WatchSpec
from ...spec.files import write_whole
from .alarm import STACKS_SIGNAL, Alarm, exit_now, report_from_heartbeat
from .flight import FlightRecorder

SAMPLE_S = 0.05
WINDOW = 100  # samples: what a rank has been doing for the last seconds
COMMUNICATION_CODE = tuple(str(Path(module.__file__ or "").parent) for module in (dist, parallel))


@contextmanager
def run_watchdog(spec: WatchSpec, folder: RunFolder, attempt: int, mesh: Mesh | None) -> Iterator[Watchdog | None]:
    """Run the watchdog of this rank; none for a single process."""
    if mesh is None or mesh.size("world") == 1:
        yield None
        return
    watchdog = Watchdog(spec, folder, attempt, mesh)
    try:
        run_on_all_ranks(watchdog.start)  # an error of one rank is raised by all
    except BaseException:
        if watchdog.thread.is_alive():
            watchdog.stop()
        raise
    try:
        yield watchdog
    except BaseException:
        watchdog.stop()
        raise  # the heartbeat file stays, for the reports of other ranks
    watchdog.stop()
    watchdog.remove_heartbeat()


class Watchdog:
    def __init__(self, spec: WatchSpec, folder: RunFolder, attempt: int, mesh: Mesh) -> None:
        self.spec, self.folder, self.attempt = spec, folder, attempt
        self.rank, self.world = mesh.rank("world"), mesh.size("world")
        self.heartbeat_path = folder.path / "watch" / f"rank-{self.rank}.life"
        self.flight, self.main = FlightRecorder(mesh), MainThread()
        self.alarm = Alarm(spec, folder, attempt, mesh, self.flight)
        self.skew = Skew(spec, stages(mesh.grid))
        self.check_s = min(5.0, spec.timeout_s / 10)
        self.flush_s = max(self.check_s, min(30.0, spec.timeout_s / 60))
        self.samples: deque[bool] = deque([True], WINDOW)
        self.sampled = self.waited = 0  # since the start: samples, and those in which this rank waited for others
        self.oom_kills = oom_kills()  # before the first step
        self.entered = 0  # phases
        self.since: dict[object, float] = {}  # what is being waited for → since when
        self.checked = self.flushed = 0.0
        self.answered = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.loop, name="watchdog", daemon=True)

    def start(self) -> None:
        heartbeat = own_heartbeat(self.rank, self.attempt)
        try:
            self.heartbeat_path.parent.mkdir(parents=True, exist_ok=True)  # NFS may not show yet what rank 0 has made
            write_whole(
                self.heartbeat_path,
                heartbeat.first() + heartbeat.second(heartbeat.time, heartbeat.phase, heartbeat.step),
            )
            with self.heartbeat_path.open("r+b") as file:
                self.heartbeat = mmap.mmap(file.fileno(), 0)
            self.stacks: IO[str] = self.heartbeat_path.with_suffix(".stacks").open("w")
        except OSError as error:
            raise TrainingError(f"cannot write {self.heartbeat_path}: {error.strerror}") from None
        self.at = len(heartbeat.first())
        faulthandler.register(STACKS_SIGNAL, self.stacks, all_threads=True)
        phase.listeners.append(self.on_phase)
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()
        phase.listeners.remove(self.on_phase)
        faulthandler.unregister(STACKS_SIGNAL)
        self.stacks.close()
        self.heartbeat.close()

    def remove_heartbeat(self) -> None:
        for path in (self.heartbeat_path, self.heartbeat_path.with_suffix(".stacks")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # others are still there
            self.heartbeat_path.parent.rmdir()

    def on_phase(self, name: str, step: int) -> None:
        """Called at every phase: about a microsecond. Visible to other processes of this host at once."""
        self.entered += 1
        self.heartbeat[self.at :] = Heartbeat.second(time.time(), name, step)

    @property
    def busy(self) -> float:
        """The share of the last seconds in which this rank did not wait for others."""
        samples = list(self.samples)
        return sum(samples) / WINDOW if len(samples) == WINDOW else 1.0  # too few samples

    def compare(self, busy: Sequence[float], step: int) -> None:
        """With the busy share of every rank: rank 0 reports stragglers."""
        for slow in self.skew.update(busy):
            if self.rank:
                continue
            heartbeat = read_heartbeats(self.folder.path, self.attempt).get(slow.rank)
            host = heartbeat.host if heartbeat else ""
            self.folder.event("straggler", step, **vars(slow), host=host)
            where = f"rank {slow.rank}" + (f" on {host}" if host else "")
            change = "keeps up again" if slow.recovered else f"is slow: busy {slow.ratio:g} × as long as the others"
            print(f"step {step}: {where} {change}", file=sys.stderr, flush=True)

    # --- the thread -------------------------------------------------------------------------------------

    def loop(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            now = time.monotonic()
            waited = self.sample(now)
            if now - self.checked < self.check_s:
                continue
            self.checked = now
            try:
                self.check(now, waited)
            except Exception as error:  # a full disk, a folder that was taken away: a hang must end all the same
                print(f"lmworks: the watchdog of rank {self.rank}: {error!r}", file=sys.stderr, flush=True)
            if waited > self.spec.timeout_s:
                exit_now()

    def sample(self, now: float) -> float:
        """Sample the main thread; returns the seconds that it has waited in the same call."""
        asleep = self.main.is_sleeping()
        place = self.communication_frame() if asleep else None
        status = self.flight.status()
        waits: set[object] = {(group, one.done) for group, one in status.items() if one.entered > one.done}
        busy = not (asleep and (waits or place)) and not any(one.runs for one in status.values())
        self.samples.append(busy)
        self.sampled, self.waited = self.sampled + 1, self.waited + (not busy)
        if place is not None:
            waits.add((self.entered, *place))
        self.since = {what: self.since.get(what, now) for what in waits}
        return now - min(self.since.values(), default=now)

    def communication_frame(self) -> tuple[object, int] | None:
        """The position of the main thread, if it is in communication code."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not frame.f_code.co_filename.startswith(COMMUNICATION_CODE):
            return None
        return frame.f_code, frame.f_lasti

    def check(self, now: float, waited: float) -> None:
        if now - self.flushed >= self.flush_s:
            self.flushed = now
            self.heartbeat.flush()  # a shared file system shows it to other hosts only then
        if waited > self.spec.timeout_s:
            self.alarm.trigger("timeout")
        if not self.answered and self.alarm.path.exists():
            self.answered = True
            self.alarm.respond(is_waiting=self.main.is_sleeping() and self.communication_frame() is not None)

    # --- RankMonitor of parallel.world ------------------------------------------------------------------

    def dead_ranks(self) -> str | None:
        """Ranks of this host whose processes have ended; after a hang, its cause."""
        verdict = self.alarm.read_verdict()
        if verdict is not None:
            return self.with_oom(verdict)
        heartbeats = read_heartbeats(self.folder.path, self.attempt)
        states = {rank: process_state(heartbeat) for rank, heartbeat in heartbeats.items()}
        if "gone" not in states.values():
            return None
        here = {
            rank: report_from_heartbeat(heartbeat, states)
            for rank, heartbeat in heartbeats.items()
            if states[rank] != "gone"
        }
        return self.with_oom(find_cause(self.world, here, heartbeats, states))

    def diagnose(self) -> str | None:
        """If a collective failed and no process has ended: the cause from the reports of all ranks."""
        with suppress(OSError, LMWorksError):
            self.alarm.trigger("loss")
            verdict = self.alarm.verdict(patience_s=20.0)
            if verdict is not None and verdict.ranks:
                return self.with_oom(verdict)
        return None

    def with_oom(self, verdict: Verdict) -> str:
        """The text of a verdict; if a process is gone and the OOM killer was active meanwhile, with that cause."""
        kills = oom_kills()
        if verdict.kind != "gone" or self.oom_kills is None or kills is None or kills <= self.oom_kills:
            return verdict.text
        return f"{verdict.text}; it probably ran out of memory: the kernel's OOM killer ended a process here meanwhile"


def stages(grid: Grid) -> list[list[int]]:
    """Ranks with the same work, by pipeline stage."""
    places: dict[int, list[int]] = {}
    for rank in range(grid.world):
        places.setdefault(grid.coordinates(rank)["pp"], []).append(rank)
    return list(places.values())


class MainThread:
    """Whether the main thread of this process sleeps, as it does in a gloo collective."""

    def __init__(self) -> None:
        self.path = f"/proc/self/task/{threading.main_thread().native_id}/stat"

    def is_sleeping(self) -> bool:
        try:
            return read_stat(self.path)[0] == "S"
        except OSError:
            return True


# --- stragglers ------------------------------------------------------------------------------------------


MIN_BUSY_SHARE = 0.5  # a straggler hardly waits itself; small shares differ by chance


@dataclass(frozen=True)
class Straggler:
    """A rank became slow, or has recovered."""

    rank: int
    ratio: float  # its busy time over that of the median rank
    recovered: bool


class Skew:
    """Compares ranks that have the same work: those of one pipeline stage. Stages of one rank are skipped."""

    def __init__(self, spec: WatchSpec, stages: Sequence[Sequence[int]]) -> None:
        self.spec = spec
        self.stages = [list(stage) for stage in stages if len(stage) > 1]
        self.slow_for: dict[int, int] = {}  # steps in a row
        self.fine_for: dict[int, int] = {}  # of a rank that was named
        self.largest = 1.0  # ratio of the last step

    def update(self, busy: Sequence[float]) -> list[Straggler]:
        """`busy`: of every rank, the share of its time that it did not wait for others."""
        found: list[Straggler] = []
        self.largest = 1.0
        for stage in self.stages:
            usual = max(statistics.median_low([busy[rank] for rank in stage]), 0.01)
            for rank in stage:
                ratio = busy[rank] / usual
                self.largest = max(self.largest, round(ratio, 3))
                found += self.judge(rank, ratio, slow=ratio > self.spec.straggler and busy[rank] > MIN_BUSY_SHARE)
        return found

    def judge(self, rank: int, ratio: float, slow: bool) -> list[Straggler]:
        """Reported, and recovered, after straggler_steps consecutive steps."""
        if rank in self.fine_for:
            self.fine_for[rank] = 0 if slow else self.fine_for[rank] + 1
            if self.fine_for[rank] < self.spec.straggler_steps:
                return []
            del self.fine_for[rank]
            return [Straggler(rank, round(ratio, 2), recovered=True)]
        self.slow_for[rank] = self.slow_for.get(rank, 0) + 1 if slow else 0
        if self.slow_for[rank] < self.spec.straggler_steps:
            return []
        self.slow_for[rank], self.fine_for[rank] = 0, 0
        return [Straggler(rank, round(ratio, 2), recovered=False)]
