"""Profile a run under way: leave a request in its folder, and wait until the chosen ranks have written their traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec.errors import LMWorksError, SpecError
from .folder import RunFolder
from .heartbeat import process_state, read_heartbeats
from .jsonl import decode
from .profile_request import ProfileRequest, read_request, trace_path, withdraw, write_request

POLL_S = 0.2
TAIL_BYTES = 65536  # of metrics.jsonl: a few lines
END_S = 10.0  # after a run has ended: for a shared file system to show its last files
ENDS = {"finish": "it has finished", "interrupt": "it was stopped", "pause": "it paused", "fail": "it has failed"}


@dataclass(frozen=True)
class Attached:
    first: int
    last: int
    traces: list[Path]
    steps: int  # recorded: fewer than asked for where the run ended


class Tail:
    """Records that are appended to a file of JSON lines."""

    def __init__(self, path: Path, back: int = 0) -> None:
        self.path, self.rest = path, b""
        self.at = max(0, (path.stat().st_size if path.exists() else 0) - back)

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.at)
                content = file.read()
        except OSError:
            return []
        self.at += len(content)
        *lines, self.rest = (self.rest + content).split(b"\n")
        return [record for line in lines if (record := decode(line)) is not None]


class Attach:
    """`progress(stage, done, total)` is called at every look at the run folder."""

    def __init__(
        self,
        folder: RunFolder,
        request: ProfileRequest,
        timeout_s: float,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.folder, self.request, self.timeout_s, self.progress = folder, request, timeout_s, progress
        self.step = 0  # the last one of which the run has written metrics
        self.window: tuple[int, int] | None = None  # once the run has taken the request
        self.ranks: list[int] = []
        self.heard = time.monotonic()  # when a step was seen
        self.ended = 0.0

    def run(self) -> Attached:
        """A request that the run has not taken is withdrawn, however this ends."""
        self.check()
        self.events = Tail(self.folder.events_path)
        self.metrics = Tail(self.folder.metrics_path, TAIL_BYTES)
        self.look()
        write_request(self.folder, self.request)
        try:
            first, last = self.wait_until_taken()
            self.wait_for_steps(first, last)
            return Attached(first, last, self.wait_for_traces(first, last), min(last, self.step) - first + 1)
        finally:
            withdraw(self.folder, self.request)

    def check(self) -> None:
        path, world = self.folder.path, self.folder.spec().parallel.world
        if not self.folder.is_locked():
            raise SpecError(f"{path} is not running: {self.end_text()}; there is no step to profile")
        if self.request.ranks is not None and not all(0 <= rank < world for rank in self.request.ranks):
            there = f"ranks 0 to {world - 1}" if world > 1 else "rank 0 alone"
            raise SpecError(f"--ranks {','.join(map(str, self.request.ranks))}: {path} trains on {there}")
        if read_request(self.folder) is not None:
            raise SpecError(f"{path} has a request to profile already; wait until it is done")

    def end_text(self) -> str:
        kinds = [event for event in self.folder.events() if event["kind"] in ENDS]
        if not kinds:
            return "no process trains it"
        last = kinds[-1]
        error = f" ({last['error']})" if last["kind"] == "fail" and last.get("error") else ""
        return f"{ENDS[last['kind']]} after step {last['step']}{error}"

    # --- waiting ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What the run has written since the last look."""
        for event in self.events.read():
            if event.get("kind") == "profile" and event.get("id") == self.request.id:
                self.window, self.ranks = (event["first"], event["last"]), event["ranks"]
        if lines := [line["step"] for line in self.metrics.read() if "step" in line]:
            self.step, self.heard = lines[-1], time.monotonic()

    def poll(self, stage: str, done: int = 0, total: int = 0) -> bool:
        """One look. False where the run has ended; an error where it takes no step any more."""
        running = self.folder.is_locked()  # before the look: what it wrote last is seen
        self.look()
        self.progress(stage, done, total)
        if not running:
            self.ended = self.ended or time.monotonic()
        elif time.monotonic() - self.heard > self.timeout_s:
            withdrawn = "; the request is withdrawn" if self.window is None else ""
            raise LMWorksError(f"{self.folder.path}: no step for {self.timeout_s:g} s{self.where()}{withdrawn}")
        time.sleep(POLL_S)
        return running

    def where(self) -> str:
        """Where the ranks are, by their heartbeats: those that a run of several ranks writes."""
        beats = read_heartbeats(self.folder.path).values()
        states = {beat.rank: process_state(beat) for beat in beats}
        notes = {rank: "" if state == "running" else f" ({state})" for rank, state in states.items()}
        found = [f"rank {beat.rank} is in {beat.place}{notes[beat.rank]}" for beat in beats]
        return "; " + ", ".join(found) if found else ""

    def wait_until_taken(self) -> tuple[int, int]:
        while self.window is None:
            if not self.poll(f"{self.folder.path} is at step {self.step}") and self.window is None:
                raise LMWorksError(
                    f"{self.folder.path}: the run ended before it took the request: {self.end_text()}; no step was "
                    "profiled"
                )
            if self.window is None and read_request(self.folder) != self.request:
                self.look()
                if self.window is None:
                    raise LMWorksError(f"{self.folder.path} was started again meanwhile: attach once more")
        return self.window

    def wait_for_steps(self, first: int, last: int) -> None:
        while self.step < last:
            done = max(0, self.step - first + 1)
            if not self.poll(f"profiling steps {first} to {last}", done, last - first + 1):
                return

    def wait_for_traces(self, first: int, last: int) -> list[Path]:
        paths = {rank: trace_path(self.folder, rank, first, last) for rank in self.ranks}
        written, since = 0, time.monotonic()
        while missing := [str(rank) for rank, path in paths.items() if not path.exists()]:
            if len(paths) - len(missing) > written:
                written, since = len(paths) - len(missing), time.monotonic()
            running = self.poll("writing traces", written, len(paths))
            no_trace = f"no trace of rank {', '.join(missing)}"
            if not running and time.monotonic() - self.ended > END_S:
                raise LMWorksError(f"{self.folder.path}: {no_trace}; {self.end_text()}")
            if running and time.monotonic() - since > self.timeout_s:
                raise LMWorksError(f"{self.folder.path}: {no_trace} within {self.timeout_s:g} s{self.where()}")
        return list(paths.values())
