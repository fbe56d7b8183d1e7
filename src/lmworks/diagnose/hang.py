"""Diagnosis of a recorded hang, or of a live run: where each rank is now."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..record import RunFolder
from ..record.hang import Report, Verdict, attempts, find_cause, group_name, read_reports
from ..record.heartbeat import UNKNOWN, Heartbeat, process_state, read_heartbeats, read_writer_heartbeats
from ..spec import SpecError


@dataclass(frozen=True)
class RankState:
    rank: int
    host: str
    state: str  # of the process: running, stopped, gone, unknown; or reported
    place: str  # e.g. forward of step 17
    waits_in: str | None
    for_s: float | None  # time in this state, or since its last heartbeat
    stacks: str | None  # of all its threads


@dataclass(frozen=True)
class WriterState:
    """The writer process of a rank in an asynchronous save in progress."""

    rank: int
    host: str
    pid: int
    state: str
    checkpoint: str
    for_s: float  # since it got the job


@dataclass(frozen=True)
class Diagnosis:
    run: str
    attempt: int | None  # None: a live run, or ranks that ended without a report
    verdict: Verdict | None
    folder: str | None
    ranks: tuple[RankState, ...]
    earlier: dict[int, str] = field(default_factory=dict)  # of a live run: why earlier attempts stopped
    writers: tuple[WriterState, ...] = ()
    failed_saves: tuple[str, ...] = ()  # of the last attempt, with errors of the writers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(run: RunFolder, attempt: int | None = None) -> Diagnosis:
    """The last recorded hang, or that of an attempt; without any, the heartbeats of the ranks."""
    known = attempts(run.path)
    if attempt is not None and attempt not in known:
        has = f"it has of {', '.join(map(str, known))}" if known else "no attempt has"
        raise SpecError(f"{run.path} has no reports of a hang of attempt {attempt}; {has}")
    if attempt is None and (not known or run.is_locked()):
        return from_heartbeats(run, known)
    number = max(known) if attempt is None else attempt
    folder = known[number]
    reports = read_reports(folder)
    beats = read_heartbeats(run.path, number)
    world = run.spec().parallel.world
    verdict = read_verdict(folder) or find_cause(world, reports, beats)
    ranks = [from_report(reports[rank], world) for rank in reports]
    seen = {rank: state for one in reports.values() for rank, state in one.states.items() if state != UNKNOWN}
    silent = [
        replace(from_beat(beat, beat.time, folder), state=seen.get(rank, UNKNOWN))
        for rank, beat in beats.items()
        if rank not in reports
    ]
    both = sorted([*ranks, *silent], key=lambda one: one.rank)
    return Diagnosis(str(run.path), number, verdict, str(folder), tuple(both), failed_saves=failed_saves(run))


def read_verdict(folder: Path) -> Verdict | None:
    """None if all ranks ended before a verdict."""
    path = folder / "verdict.json"
    return Verdict.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def from_heartbeats(run: RunFolder, known: dict[int, Path]) -> Diagnosis:
    now = time.time()
    ranks = tuple(from_beat(beat, now, None) for beat in read_heartbeats(run.path).values())
    verdicts = {number: read_verdict(folder) for number, folder in sorted(known.items())}
    earlier = {number: verdict.text for number, verdict in verdicts.items() if verdict is not None}
    writers = tuple(writer_state(beat, now) for beat in read_writer_heartbeats(run.path).values())
    return Diagnosis(str(run.path), None, None, None, ranks, earlier, writers, failed_saves(run))


def writer_state(beat: Heartbeat, now: float) -> WriterState:
    name, for_s = f"step-{beat.step:06d}", round(now - beat.time, 1)
    return WriterState(beat.rank, beat.host, beat.pid, process_state(beat), name, for_s)


def failed_saves(run: RunFolder) -> tuple[str, ...]:
    found: list[str] = []
    for event in run.events():
        if event["kind"] in ("start", "resume"):
            found = []
        elif event["kind"] == "save_failed":
            found.append(f"{event['path']} was not saved: {event['error']}")
    return tuple(found)


def from_report(report: Report, world: int) -> RankState:
    waits, age = None, None
    for call in report.pending()[:1]:
        waits, age = f"{call} of group {group_name(call.group, report.groups, world)}", call.age_s
    if waits is None and report.waits:
        waits = "a message to or from a neighbour"
    return RankState(report.rank, report.host, "reported", report.place, waits, age, report.stacks)


def from_beat(beat: Heartbeat, now: float, folder: Path | None) -> RankState:
    """Of a rank without a report: its last heartbeat, and stacks dumped by a signal."""
    stacks = folder / f"rank-{beat.rank}.stacks" if folder else None
    text = stacks.read_text(encoding="utf-8", errors="replace") if stacks and stacks.exists() else None
    for_s = round(now - beat.time, 1) if folder is None else None
    return RankState(beat.rank, beat.host, process_state(beat), beat.place, None, for_s, text)
