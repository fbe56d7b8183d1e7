"""A thread in every rank that ends a hang: it notices one, gathers what all ranks know, names the cause, and stops.

The main thread may sit in C++ and never come back, so nothing here exchanges anything with other ranks over the process
groups or their store, which a rank that is stopped may itself hold. Ranks meet in the run folder:

    watch/rank-2.life             where each of them is, at every phase; removed when the run ends in order
    hangs/attempt-0/alarm.json    the first rank that has waited too long calls all others
    hangs/attempt-0/rank-2.json   each of them reports
    hangs/attempt-0/verdict.json  the lowest rank that has reported judges; whoever reads this ends
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch.distributed as dist

from ... import parallel
from ...parallel.mesh import Mesh
from ...record import RunFolder, phase
from ...record.hang import UNSEEN, Beat, Report, Verdict, judge, read_beats, read_reports
from ...spec import LMWorksError, TrainingError, WatchSpec
from ...spec.files import write_whole
from .flight import Flight
from .process import MainThread, own_beat, state_of

SAMPLE_S = 0.05
WINDOW = 100  # samples: what a rank has been doing for the last seconds
PATIENCE_S = 10.0  # that ranks have to report, or the judge to judge
PROD_AFTER_S = 2.0  # then a rank of this host that has not reported is asked by a signal
ASK = signal.SIGUSR2  # answered by faulthandler in C, where Python itself is stuck
TALKING = tuple(str(Path(module.__file__ or "").parent) for module in (dist, parallel))


@contextmanager
def watching(spec: WatchSpec, folder: RunFolder, attempt: int, mesh: Mesh | None) -> Iterator[Watchdog | None]:
    """Watch over this rank while it trains; a process alone waits for nobody."""
    if mesh is None or mesh.size("world") == 1:
        yield None
        return
    watchdog = Watchdog(spec, folder, attempt, mesh)
    watchdog.start()
    try:
        yield watchdog
    except BaseException:
        watchdog.stop()
        raise  # the sign of life stays: the others see there when and where this rank was last
    watchdog.stop()
    watchdog.forget()


class Watchdog:
    def __init__(self, spec: WatchSpec, folder: RunFolder, attempt: int, mesh: Mesh) -> None:
        self.spec, self.folder, self.mesh = spec, folder, mesh
        self.rank, self.world = mesh.rank("world"), mesh.size("world")
        self.reports = folder.path / "hangs" / f"attempt-{attempt}"
        self.life = folder.path / "watch"
        self.sign_path = self.life / f"rank-{self.rank}.life"
        self.flight, self.main = Flight(mesh), MainThread()
        self.check_s = min(5.0, spec.timeout_s / 10)
        self.beat_s = max(self.check_s, min(30.0, spec.timeout_s / 60))
        self.samples: deque[bool] = deque([True], WINDOW)
        self.entered = 0  # phases
        self.since: dict[object, float] = {}  # what is being waited for → since when
        self.checked = self.beaten = 0.0
        self.answered = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.loop, name="watchdog", daemon=True)

    def start(self) -> None:
        self.life.mkdir(exist_ok=True)
        beat = own_beat(self.rank)
        write_whole(self.sign_path, beat.first() + beat.second(beat.time, beat.phase, beat.step))
        with self.sign_path.open("r+b") as file:
            self.sign = mmap.mmap(file.fileno(), 0)
        self.at = len(beat.first())
        self.stacks: IO[str] = self.sign_path.with_suffix(".stacks").open("w")
        faulthandler.register(ASK, self.stacks, all_threads=True)
        phase.listeners.append(self.progress)
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()
        phase.listeners.remove(self.progress)
        faulthandler.unregister(ASK)
        self.stacks.close()
        self.sign.close()

    def forget(self) -> None:
        for path in (self.sign_path, self.sign_path.with_suffix(".stacks")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # others are still there
            self.life.rmdir()

    def progress(self, name: str, step: int) -> None:
        """Called at every phase: about a microsecond. Ranks of this host can read it at once."""
        self.entered += 1
        self.sign[self.at :] = Beat.second(time.time(), name, step)

    @property
    def busy(self) -> float:
        """The share of its time that this rank did not wait for others, of the last seconds."""
        samples = list(self.samples)
        return sum(samples) / len(samples)

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
                self.end()

    def check(self, now: float, waited: float) -> None:
        if now - self.beaten >= self.beat_s:
            self.beaten = now
            self.sign.flush()  # a shared file system shows it to other hosts only then
        if waited > self.spec.timeout_s:
            self.call_all("timeout")
        if not self.answered and (self.reports / "alarm.json").exists():
            self.answered = True
            self.report()
            self.conclude()

    def sample(self, now: float) -> float:
        """See what the main thread does; returns the seconds that it has waited for the same thing."""
        asleep = self.main.sleeps()
        place = self.standing() if asleep else None
        status = self.flight.status()
        waits: set[object] = {(group, one.done) for group, one in status.items() if one.entered > one.done}
        self.samples.append(not (asleep and (waits or place)) and not any(one.runs for one in status.values()))
        if place is not None:
            waits.add((self.entered, *place))
        self.since = {what: self.since.get(what, now) for what in waits}
        return now - min(self.since.values(), default=now)

    def standing(self) -> tuple[object, int] | None:
        """Where the main thread stands, if that is in code that talks to other ranks."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not frame.f_code.co_filename.startswith(TALKING):
            return None
        return frame.f_code, frame.f_lasti

    # --- a hang -----------------------------------------------------------------------------------------

    def call_all(self, reason: str) -> None:
        self.reports.mkdir(parents=True, exist_ok=True)
        path = self.reports / "alarm.json"
        if not path.exists():
            write_whole(path, json.dumps({"reason": reason, "rank": self.rank}))

    def report(self) -> None:
        beats = read_beats(self.folder.path)
        report = Report(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=phase.name,
            step=phase.step,
            waits=self.main.sleeps() and self.standing() is not None,
            calls=self.flight.calls(),
            groups=self.flight.groups(),
            states={rank: state_of(beat) for rank, beat in beats.items()},
            stacks=own_stacks(),
        )
        write_whole(self.reports / f"rank-{self.rank}.json", report.to_json())

    def conclude(self) -> None:
        """Judge, if that is this rank's to do, or wait for the judge; where it was a hang, end."""
        reports, states = self.gather()
        if min(reports) == self.rank and not self.verdict_path.exists():
            beats = read_beats(self.folder.path)
            verdict = judge(self.world, reports, beats, states)
            self.keep_stacks(states)
            if self.hangs:
                self.tell(verdict)
            write_whole(self.verdict_path, json.dumps(verdict.to_dict(), indent=1))  # last: the others end at it
        self.await_verdict()
        if self.hangs:
            self.release(states)
            self.end()

    @property
    def verdict_path(self) -> Path:
        return self.reports / "verdict.json"

    @property
    def hangs(self) -> bool:
        """Else a rank has lost another, and only asks: every rank's main thread finds out by itself."""
        alarm = json.loads((self.reports / "alarm.json").read_text(encoding="utf-8"))
        return bool(alarm["reason"] == "timeout")

    def gather(self) -> tuple[dict[int, Report], dict[int, str]]:
        """Wait for the reports of all who can report; with the states of the processes of those who did not."""
        began, asked = time.monotonic(), False
        while True:
            reports = read_reports(self.reports)
            beats = {rank: beat for rank, beat in read_beats(self.folder.path).items() if rank not in reports}
            states = {rank: state_of(beat) for rank, beat in beats.items()}
            missing = self.world - len(reports)
            waited = time.monotonic() - began
            if sum(state in ("stopped", "gone") for state in states.values()) == missing or waited > PATIENCE_S:
                return reports, states
            if waited > PROD_AFTER_S and not asked:
                asked = True
                for rank, state in states.items():
                    if state == "running" and min(reports) == self.rank:
                        send(beats[rank], ASK)
            time.sleep(SAMPLE_S)

    def await_verdict(self) -> Verdict | None:
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            if self.verdict_path.exists():
                return Verdict.from_dict(json.loads(self.verdict_path.read_text(encoding="utf-8")))
            time.sleep(SAMPLE_S)
        return None

    def keep_stacks(self, states: dict[int, str]) -> None:
        """Those that ranks without a report have left at the signal."""
        for rank in states:
            source = self.life / f"rank-{rank}.stacks"
            if source.exists() and source.stat().st_size:
                shutil.copyfile(source, self.reports / source.name)

    def tell(self, verdict: Verdict) -> None:
        """In the run's events and on the terminal; the main thread of the lead may never come to it."""
        text = f"a collective took more than {self.spec.timeout_s:g} s: {verdict.text}"
        where = str(self.reports.relative_to(self.folder.path))
        self.folder.event("hang", phase.step, ranks=list(verdict.ranks), cause=verdict.kind, reports=where)
        self.folder.event("fail", phase.step, error=text)
        print(f"lmworks: error: {text} (lmworks diagnose {self.folder.path})", file=sys.stderr, flush=True)

    def release(self, states: dict[int, str]) -> None:
        """Let ranks of this host that are stopped go on: their own watchdogs then end them, or else the kernel."""
        beats = read_beats(self.folder.path)
        silent = [beats[rank] for rank, state in states.items() if state in ("stopped", "running")]
        for beat in silent:
            send(beat, signal.SIGCONT)
        give_up = time.monotonic() + 2 * self.check_s + 1
        while time.monotonic() < give_up and any(state_of(beat) in ("stopped", "running") for beat in silent):
            time.sleep(SAMPLE_S)
        for beat in silent:
            send(beat, signal.SIGKILL)

    def end(self) -> None:
        """At once, from this thread: the main thread waits in a place that nothing can call it back from."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(TrainingError.exit_code)

    # --- another rank is lost ---------------------------------------------------------------------------

    def gone(self) -> str | None:
        """Ranks of this host whose processes have ended."""
        beats = read_beats(self.folder.path)
        states = {rank: state_of(beat) for rank, beat in beats.items()}
        if "gone" not in states.values():
            return None
        here = {rank: blank(beat, states) for rank, beat in beats.items() if states[rank] != "gone"}
        return judge(self.world, here, beats, states).text

    def why(self) -> str | None:
        """Where nobody is gone and a collective failed all the same: what all ranks together make of it."""
        with suppress(OSError, LMWorksError):
            self.call_all("loss")
            give_up = time.monotonic() + 2 * PATIENCE_S
            while time.monotonic() < give_up and self.thread.is_alive():
                verdict = self.await_verdict()
                if verdict is not None:
                    return verdict.text if verdict.ranks else None
        return None


def own_stacks() -> str:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def blank(beat: Beat, states: dict[int, str]) -> Report:
    """A rank that is well, as far as its sign of life tells."""
    return Report(beat.rank, beat.host, beat.pid, beat.phase, beat.step, False, (), {}, states, "")


def send(beat: Beat, number: signal.Signals) -> None:
    if state_of(beat) not in ("gone", UNSEEN):
        with suppress(OSError):
            os.kill(beat.pid, number)
