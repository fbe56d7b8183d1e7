"""Reports of ranks that hang, and the ranks that caused it.

    hangs/attempt-0/rank-2.json     one rank: where it was, the stacks of its threads, its last collectives
    hangs/attempt-0/verdict.json    which ranks are the cause, and why

A collective is identified on every rank of its group by the group and its sequence number. A rank in a collective that
others have not entered waits for them; they may wait for yet others, in other groups. The ranks at the end of such a
chain, which wait for no other rank, are the cause.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..spec.grid import shorten
from .heartbeat import UNKNOWN, Heartbeat, phase_text

ATTEMPT = re.compile(r"attempt-([0-9]+)")
SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")  # equal on every rank


@dataclass(frozen=True)
class Call:
    """A collective, or a message to one other rank (`peer`), as one rank has recorded it."""

    group: str
    op: str
    number: int  # sequence number in the group
    elements: int
    dtype: str
    done: bool
    age_s: float
    peer: int | None = None

    def __str__(self) -> str:
        return self.op if self.peer is not None else f"{self.op} #{self.number}"


@dataclass(frozen=True)
class Group:
    label: str  # its mesh axis
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    rank: int
    host: str
    pid: int
    phase: str
    step: int
    waits: bool  # its main thread is in a communication call, recorded or not
    calls: tuple[Call, ...]
    groups: Mapping[str, Group]
    states: Mapping[int, str]  # of the processes of ranks on its host: running, stopped, gone
    stacks: str

    @property
    def place(self) -> str:
        return phase_text(self.phase, self.step)

    def pending(self) -> list[Call]:
        """The first call of each group that is not done."""
        first: dict[tuple[str, bool], Call] = {}
        for call in sorted(self.calls, key=lambda call: call.number):
            if not call.done:
                first.setdefault((call.group, call.peer is None), call)
        return list(first.values())

    def entered(self, call: Call) -> bool:
        return any(mine.group == call.group and mine.peer is None and mine.number >= call.number for mine in self.calls)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        data = json.loads(text)
        data["calls"] = tuple(Call(**call) for call in data["calls"])
        data["groups"] = {name: Group(group["label"], tuple(group["ranks"])) for name, group in data["groups"].items()}
        data["states"] = {int(rank): state for rank, state in data["states"].items()}
        return cls(**data)


@dataclass(frozen=True)
class Verdict:
    kind: str  # stopped, gone, silent, mismatch, late, circle, stuck
    ranks: tuple[int, ...]  # the cause
    text: str
    waiting: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # where ranks wait, and which

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        waiting = {place: tuple(ranks) for place, ranks in data["waiting"].items()}
        return cls(data["kind"], tuple(data["ranks"]), data["text"], waiting)


def find_cause(
    world: int,
    reports: Mapping[int, Report],
    heartbeats: Mapping[int, Heartbeat],
    states: Mapping[int, str] | None = None,
) -> Verdict:
    """From the reports, and the ranks without one. `states` of processes are newer than those in the reports."""
    waiting = waiting_ranks(reports, world)
    waits = "; ".join(
        f"{rank_list(ranks)} {verb(ranks, 'wait')} in {place}" for place, ranks in list(waiting.items())[:3]
    )
    verdict = (
        find_mismatch(reports, world) or find_silent(world, reports, heartbeats, states or {}) or find_late(reports)
    )
    kind, ranks, text = verdict
    whole = f"{waits}; {text}" if waits and kind != "mismatch" else text
    return Verdict(kind, tuple(ranks), whole, waiting)


Finding = tuple[str, list[int], str]


def find_silent(
    world: int, reports: Mapping[int, Report], heartbeats: Mapping[int, Heartbeat], states: Mapping[int, str]
) -> Finding | None:
    """Ranks without a report; the state of their processes shows why."""
    missing = [rank for rank in range(world) if rank not in reports]
    if not missing:
        return None
    all_states = [*(report.states for report in reports.values()), states]
    seen = {rank: state for some in all_states for rank, state in some.items() if state != UNKNOWN}
    kinds = {
        "stopped": ("is stopped (by SIGSTOP or a debugger)", "are stopped (by SIGSTOP or a debugger)"),
        "gone": ("is gone: its process has ended", "are gone: their processes have ended"),
        "running": ("is alive but does not answer", "are alive but do not answer"),
        UNKNOWN: ("does not answer, and neither does its host", "do not answer, and neither do their hosts"),
    }
    kind = next(kind for kind in kinds if any(seen.get(rank, UNKNOWN) == kind for rank in missing))
    ranks = [rank for rank in missing if seen.get(rank, UNKNOWN) == kind]
    last = {heartbeats[rank].place for rank in ranks if rank in heartbeats}
    text = f"{rank_list(ranks)} {kinds[kind][len(ranks) > 1]}" + (
        f", last seen in {last.pop()}" if len(last) == 1 else ""
    )
    return {"running": "silent", UNKNOWN: "silent"}.get(kind, kind), ranks, f"{text}: {cause_text(ranks)}"


def find_mismatch(reports: Mapping[int, Report], world: int) -> Finding | None:
    """The first sequence number at which ranks of a group entered different collectives, or other sizes."""
    by_place: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, report in reports.items():
        for call in report.calls:
            if call.peer is None:
                by_place.setdefault((call.group, call.number), {})[rank] = call
    for (group, number), calls in sorted(by_place.items(), key=lambda item: item[0][1]):
        difference = find_difference(calls)
        if difference:
            ranks, text = difference
            name = group_name(group, reports[ranks[0]].groups, world)
            guilty = cause_text(ranks) if len(ranks) < len(calls) else "either may be the cause"
            return (
                "mismatch",
                ranks,
                f"{text} (#{number} of group {name}, in {place_of(ranks, reports)}): {guilty}",
            )
    return None


def find_difference(calls: Mapping[int, Call]) -> tuple[list[int], str] | None:
    """Ranks that differ from the majority, and how; all of them without a majority."""
    for name, values in (
        ("", {rank: call.op for rank, call in calls.items()}),
        ("elements", {r: str(c.elements) for r, c in calls.items() if c.op in SAME_SIZE}),
        ("of", {rank: call.dtype for rank, call in calls.items() if call.op in SAME_SIZE}),
    ):
        if len(set(values.values())) < 2:
            continue
        ((usual, count), *_) = Counter(values.values()).most_common()
        outliers = [rank for rank, value in values.items() if value != usual]
        verb = "" if not name else f"{calls[outliers[0]].op} with "
        unit = " elements" if name == "elements" else ""
        if 2 * count <= len(values):
            text = " and ".join(f"rank {rank} entered {verb}{value}{unit}" for rank, value in sorted(values.items()))
            return sorted(values), text
        have = "have" if name else "entered"
        return (
            outliers,
            f"{rank_list(outliers)} entered {verb}{values[outliers[0]]}{unit} where the others {have} {usual}{unit}",
        )
    return None


def find_late(reports: Mapping[int, Report]) -> Finding:
    """All ranks have reported: those that others wait for, and that wait for no rank themselves."""
    edges = {rank: awaited_ranks(report, reports) for rank, report in reports.items()}
    awaited = set().union(*edges.values()) if edges else set()
    causes = sorted(rank for rank in awaited if not edges[rank] and not reports[rank].pending())
    if causes:
        return (
            "late",
            causes,
            f"{rank_list(causes)} {are(causes)} in {place_of(causes, reports)} and never came: {cause_text(causes)}",
        )
    if awaited:
        circle = sorted(awaited)
        return (
            "circle",
            circle,
            f"{rank_list(circle)} wait for one another in a circle: collectives of several groups in different orders",
        )
    stuck = sorted(rank for rank, report in reports.items() if report.pending())
    if stuck:
        return "stuck", stuck, "every rank of the group entered it and none left: look at the network between them"
    return "stuck", [], "no rank is in a collective on record; the stacks show where each of them is"


def awaited_ranks(report: Report, reports: Mapping[int, Report]) -> set[int]:
    found = set()
    for call in report.pending():
        if call.peer is not None:
            found.add(call.peer)
            continue
        members = report.groups[call.group].ranks if call.group in report.groups else tuple(reports)
        found |= {rank for rank in members if rank in reports and not reports[rank].entered(call)}
    if not found and report.waits and not report.pending():  # an unrecorded message to or from a neighbour
        found = set(
            next((g.ranks for g in report.groups.values() if g.label == "pp" and len(g.ranks) > 1), tuple(reports))
        )
    return found - {report.rank}


def waiting_ranks(reports: Mapping[int, Report], world: int) -> dict[str, tuple[int, ...]]:
    """Call → ranks that wait in it."""
    places: dict[str, list[int]] = {}
    for rank, report in sorted(reports.items()):
        waiting_calls = [
            f"{call} of group {group_name(call.group, report.groups, world)}" for call in report.pending()[:1]
        ]
        for place in waiting_calls or (["a message to or from a neighbour"] if report.waits else []):
            places.setdefault(f"{place} ({report.place})", []).append(rank)
    return {place: tuple(ranks) for place, ranks in places.items()}


def group_name(group: str, groups: Mapping[str, Group], world: int) -> str:
    known = groups.get(group)
    if known is None:
        return group
    return known.label if len(known.ranks) == world else f"{known.label} (ranks {shorten(list(known.ranks))})"


def place_of(ranks: Iterable[int], reports: Mapping[int, Report]) -> str:
    return " or ".join(sorted({reports[rank].place for rank in ranks if rank in reports}))


def rank_list(ranks: Iterable[int]) -> str:
    some = sorted(ranks)
    return f"rank {some[0]}" if len(some) == 1 else f"ranks {', '.join(map(str, some))}"


def verb(ranks: Iterable[int], word: str) -> str:
    return word + "s" if len(list(ranks)) == 1 else word


def are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def cause_text(ranks: list[int]) -> str:
    return f"{rank_list(ranks)} {are(ranks)} the cause"


def attempts(run: Path) -> dict[int, Path]:
    """Attempts that hung, and the folders of their reports."""
    matches = ((ATTEMPT.fullmatch(path.name), path) for path in sorted((run / "hangs").glob("attempt-*")))
    return {int(match[1]): path for match, path in matches if match}


def read_reports(folder: Path) -> dict[int, Report]:
    found = [Report.from_json(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    return {report.rank: report for report in sorted(found, key=lambda report: report.rank)}
