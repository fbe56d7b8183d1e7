"""Hang handling: all ranks report, one finds the cause, all end.

Nothing here uses the process groups or their store, which a stopped rank may itself host. Ranks communicate through the
run folder:

    watch/rank-2.life             where each of them is, at every phase; removed when the run ends in order
    hangs/attempt-0/alarm.json    the first rank that has waited too long calls all others
    hangs/attempt-0/rank-2.json   each of them reports
    hangs/attempt-0/verdict.json  the lowest rank that has reported finds the cause; a rank that reads this exits
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import NoReturn

from ...parallel.mesh import Mesh
from ...record import RunFolder, phase
from ...record.hang import Report, Verdict, find_cause, read_reports
from ...record.heartbeat import UNKNOWN, Heartbeat, process_state, read_heartbeats
from ...spec import TrainingError, WatchSpec
from ...spec.files import write_whole
from .flight import FlightRecorder

POLL_S = 0.05
REPORT_TIMEOUT_S = 10.0  # for reports, and for the verdict
SIGNAL_AFTER_S = 2.0  # then a local rank without a report is asked for its stacks by a signal
STACKS_SIGNAL = signal.SIGUSR2  # handled by faulthandler in C, even if Python hangs


class Alarm:
    def __init__(self, spec: WatchSpec, folder: RunFolder, attempt: int, mesh: Mesh, flight: FlightRecorder) -> None:
        self.spec, self.run, self.attempt, self.flight = spec, folder, attempt, flight
        self.rank, self.world = mesh.rank("world"), mesh.size("world")
        self.folder = folder.path / "hangs" / f"attempt-{attempt}"
        self.path = self.folder / "alarm.json"
        self.verdict_path = self.folder / "verdict.json"

    def trigger(self, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            write_whole(self.path, json.dumps({"reason": reason, "rank": self.rank}))

    @property
    def hangs(self) -> bool:
        """Otherwise a rank has lost a peer, and only needs a diagnosis: main threads notice by themselves."""
        return bool(json.loads(self.path.read_text(encoding="utf-8"))["reason"] == "timeout")

    def respond(self, is_waiting: bool) -> None:
        """Report; find the cause if this is the lowest rank that reported, or wait for it; after a hang, end."""
        if self.verdict_path.exists():  # this rank was stopped, and the others have ended
            exit_now()
        self.report(is_waiting)
        reports, states = self.gather()
        if min(reports) == self.rank and not self.verdict_path.exists():
            verdict = find_cause(self.world, reports, read_heartbeats(self.run.path, self.attempt), states)
            self.copy_stacks(states)
            if self.hangs:
                self.record_hang(verdict)
            write_whole(self.verdict_path, json.dumps(verdict.to_dict(), indent=1))  # last: the others end at it
        self.verdict(REPORT_TIMEOUT_S)
        if self.hangs:
            self.terminate_stuck_ranks(states)
            exit_now()

    def report(self, is_waiting: bool) -> None:
        report = Report(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            phase=phase.name,
            step=phase.step,
            waits=is_waiting,
            calls=self.flight.calls(),
            groups=self.flight.groups(),
            states={
                rank: process_state(heartbeat)
                for rank, heartbeat in read_heartbeats(self.run.path, self.attempt).items()
            },
            stacks=dump_stacks(),
        )
        write_whole(self.folder / f"rank-{self.rank}.json", report.to_json())

    def gather(self) -> tuple[dict[int, Report], dict[int, str]]:
        """Wait for reports; returns them, and the process states of ranks without one."""
        began, asked = time.monotonic(), False
        while True:
            reports = read_reports(self.folder)
            heartbeats = {
                rank: heartbeat
                for rank, heartbeat in read_heartbeats(self.run.path, self.attempt).items()
                if rank not in reports
            }
            states = {rank: process_state(heartbeat) for rank, heartbeat in heartbeats.items()}
            missing = self.world - len(reports)
            waited = time.monotonic() - began
            if sum(state in ("stopped", "gone") for state in states.values()) == missing or waited > REPORT_TIMEOUT_S:
                return reports, states
            if waited > SIGNAL_AFTER_S and not asked and min(reports) == self.rank:
                asked = True
                for rank, state in states.items():
                    if state == "running":
                        send(heartbeats[rank], STACKS_SIGNAL)
            time.sleep(POLL_S)

    def verdict(self, patience_s: float) -> Verdict | None:
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up and not self.verdict_path.exists():
            time.sleep(POLL_S)
        return self.read_verdict()

    def read_verdict(self) -> Verdict | None:
        if not self.verdict_path.exists():
            return None
        return Verdict.from_dict(json.loads(self.verdict_path.read_text(encoding="utf-8")))

    def copy_stacks(self, states: dict[int, str]) -> None:
        """Of ranks without a report, written by their signal handler."""
        for rank in states:
            source = self.run.path / "watch" / f"rank-{rank}.stacks"
            if source.exists() and source.stat().st_size:
                shutil.copyfile(source, self.folder / source.name)

    def record_hang(self, verdict: Verdict) -> None:
        """In the events and on the terminal; the main thread of rank 0 may hang."""
        text = f"a collective took more than {self.spec.timeout_s:g} s: {verdict.text}"
        where = str(self.folder.relative_to(self.run.path))
        self.run.event("hang", phase.step, ranks=list(verdict.ranks), cause=verdict.kind, reports=where)
        self.run.event("fail", phase.step, error=text)
        print(f"lmworks: error: {text} (lmworks diagnose {self.run.path})", file=sys.stderr, flush=True)

    def terminate_stuck_ranks(self, states: dict[int, str]) -> None:
        """End local ranks that could not report; a stopped one is continued, and finds the verdict itself."""
        heartbeats = read_heartbeats(self.run.path, self.attempt)
        for rank, state in states.items():
            if state in ("stopped", "running"):
                send(heartbeats[rank], signal.SIGCONT if state == "stopped" else signal.SIGKILL)


def exit_now() -> NoReturn:
    """At once, from this thread: the main thread cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(TrainingError.exit_code)


def dump_stacks() -> str:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def report_from_heartbeat(heartbeat: Heartbeat, states: dict[int, str]) -> Report:
    """Of a healthy rank."""
    return Report(
        heartbeat.rank, heartbeat.host, heartbeat.pid, heartbeat.phase, heartbeat.step, False, (), {}, states, ""
    )


def send(heartbeat: Heartbeat, number: signal.Signals) -> None:
    if process_state(heartbeat) not in ("gone", UNKNOWN):
        with suppress(OSError):
            os.kill(heartbeat.pid, number)
