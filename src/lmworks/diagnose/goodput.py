"""Goodput: the time of a run by cause, every microsecond from its first record to its last.

metrics.jsonl and events.jsonl are merged by time. A record closes the gap since the previous one and says what it
contained: a step has its duration, the stall of a save and, by its event, the duration of an evaluation; the rest of
the gap has another cause. A step counts once. A step that a resume or a rewind undid is lost, whether it has been
repeated yet or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from ..record import RunFolder
from ..record.jsonl import read_lines
from ..spec import LMWorksError

CAUSES = {  # in the order of a table
    "useful": "steps that count",
    "evaluation": "held-out loss of steps that count",
    "start": "from the first record to the first step",
    "save": "training stood still for a checkpoint",
    "restart": "from an attempt's last sign of life to the next one's first step",
    "replay": "steps since the last save, lost to a stop",
    "rewind": "steps taken back on purpose, and going back",
    "skip": "steps that changed no weights",
    "hang": "until a hang was noticed",
    "other": "between steps: logging, sinks",
    "pause": "after a stop that was asked for",
}
MICROSECOND = timedelta(microseconds=1)
BEGIN = ("start", "restart", "resume")
INTENDED_ENDS = ("finish", "interrupt", "pause")
GAP_EVENTS = (*BEGIN, *INTENDED_ENDS, "fail", "hang", "rewind", "skip")  # that close a gap, besides steps


@dataclass(frozen=True)
class Span:
    """From `begin` to `end`, in microseconds since the first record."""

    begin: int
    end: int
    cause: str


@dataclass(frozen=True)
class Attempt:
    """One attempt at the run; times in microseconds since the first record."""

    number: int
    begin: int
    end: int  # its last record
    from_step: int
    to_step: int
    ended: str  # finish, interrupt, pause, fail, hang; killed if nothing was recorded; running
    error: str = ""

    @property
    def failed(self) -> bool:
        return self.ended not in (*INTENDED_ENDS, "running")


@dataclass(frozen=True)
class TimeBreakdown:
    """The time of a run so far, by cause."""

    began: str  # ISO 8601, UTC: time 0 of all spans
    spans: list[Span]  # contiguous
    attempts: list[Attempt]
    tokens: int  # of the steps that count

    @property
    def seconds(self) -> dict[str, float]:
        """By cause."""
        totals = dict.fromkeys(CAUSES, 0)
        for span in self.spans:
            totals[span.cause] += span.end - span.begin
        return {cause: total / 1e6 for cause, total in totals.items()}

    @property
    def wall_s(self) -> float:
        return self.spans[-1].end / 1e6 if self.spans else 0.0

    @property
    def active_s(self) -> float:
        """Wall time without intended pauses."""
        return self.wall_s - self.seconds["pause"]

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: useful steps and evaluations over active time."""
        seconds = self.seconds
        return (seconds["useful"] + seconds["evaluation"]) / self.active_s if self.active_s else None

    @property
    def goodput(self) -> float | None:
        """Useful tokens per second of active time."""
        return self.tokens / self.active_s if self.active_s else None

    @property
    def failures(self) -> int:
        return sum(attempt.failed for attempt in self.attempts)

    def to_dict(self) -> dict[str, Any]:
        seconds = self.seconds
        return {
            "began": self.began,
            "wall_s": self.wall_s,
            "active_s": self.active_s,
            "seconds": seconds,
            "lost_s": self.active_s - seconds["useful"] - seconds["evaluation"],
            "ettr": self.ettr,
            "goodput_tokens_per_s": self.goodput,
            "failures": self.failures,
        }


@dataclass(frozen=True)
class Record:
    """A line of either file with its time."""

    at: int  # microseconds since the first record
    kind: str  # "step", or that of an event
    step: int
    fields: dict[str, Any]

    def microseconds(self, key: str) -> int:
        value = self.fields.get(key)
        return round(value * 1e6) if isinstance(value, int | float) else 0


def time_breakdown(folder: RunFolder) -> TimeBreakdown:
    began, records = read_records(folder)
    causes = wasted_steps(records)
    spans = [span for span in time_spans(records, causes) if span.end > span.begin]
    runs = [list(group) for _, group in groupby(spans, lambda span: span.cause)]
    counted = [record for index, record in enumerate(records) if record.kind == "step" and index not in causes]
    return TimeBreakdown(
        began,
        [Span(run[0].begin, run[-1].end, run[0].cause) for run in runs],
        find_attempts(records, folder.is_locked()),
        sum(record.fields.get("tokens") or 0 for record in counted),
    )


def read_records(folder: RunFolder) -> tuple[str, list[Record]]:
    """Time 0, and the records of both files by time."""
    steps = read_lines(folder.metrics_path)
    if any("time" not in line for line in steps):
        raise LMWorksError(f"{folder.metrics_path} has steps without a time: it was written by an older version")
    lines = [*({**line, "kind": "step"} for line in steps), *folder.events()]
    timed = sorted(((datetime.fromisoformat(line["time"]), line) for line in lines), key=sort_key)
    if not timed:
        return "", []
    first = timed[0][0]
    records = [Record((time - first) // MICROSECOND, line["kind"], line["step"], line) for time, line in timed]
    return timed[0][1]["time"], records


def sort_key(line: tuple[datetime, dict[str, Any]]) -> tuple[datetime, int]:
    """Within a millisecond: events that precede a step, the step, then the rest."""
    kind = line[1]["kind"]
    return line[0], 0 if kind in (*BEGIN, "eval", "overflow") else 1 if kind == "step" else 2


def wasted_steps(records: Sequence[Record]) -> dict[int, str]:
    """Record index → cause, for steps that do not count."""
    causes: dict[int, str] = {}
    live_steps: list[int] = []  # indices of steps that have not been undone
    overflowed = -1
    for index, record in enumerate(records):
        if record.kind == "step":
            live_steps.append(index)
            if record.step == overflowed:
                causes[index] = "skip"
        elif record.kind == "overflow":
            overflowed = record.step
        elif record.kind in ("start", "resume", "rewind"):
            rewound = record.kind == "rewind"
            back_to = record.fields["to_step"] if rewound else record.step
            undone = [step for step in live_steps if records[step].step > back_to]
            causes |= dict.fromkeys(undone, "rewind" if rewound else "replay")
            live_steps = [step for step in live_steps if records[step].step <= back_to]
    return causes


def time_spans(records: Sequence[Record], causes: dict[int, str]) -> Iterator[Span]:
    """Spans in order of time; some are empty."""
    at, step, idle = 0, -1, "start"  # reached so far; the last step; what time between records is spent on
    evaluated = stalled = 0  # microseconds of evaluations and saves in the open gap
    counted_by_mark = 0  # of these saves, those that an event has accounted for
    for index, record in enumerate(records):
        if record.kind == "eval":
            evaluated += record.microseconds("seconds")
        elif record.kind == "save" and record.step == step:  # later: of a background write, in a step's line
            stalled += record.microseconds("seconds")
        elif record.kind == "step":
            cause = causes.get(index)
            saved = ("save", record.microseconds("checkpoint_s") - counted_by_mark)
            took = (cause or "useful", record.microseconds("step_s"))
            yield from split_gap(at, record.at, [saved], idle, [took, (cause or "evaluation", evaluated)])
            at, step, idle = record.at, record.step, "other"
            evaluated = stalled = counted_by_mark = 0
        elif record.kind in GAP_EVENTS:
            back = [("evaluation", evaluated), ("skip", record.microseconds("seconds") if record.kind == "skip" else 0)]
            yield from split_gap(at, record.at, [("save", stalled)], cause_before(record.kind, idle), back)
            at, idle = record.at, cause_after(record.kind, idle)
            evaluated, stalled, counted_by_mark = 0, 0, 0 if record.kind in BEGIN else counted_by_mark + stalled
    end = records[-1].at if records else 0
    yield from split_gap(at, end, [("save", stalled)], idle, [("evaluation", evaluated)])


def split_gap(
    begin: int, end: int, front: Sequence[tuple[str, int]], rest: str, back: Sequence[tuple[str, int]]
) -> Iterator[Span]:
    """Split a gap: measured (cause, microseconds) at its front and back, and `rest` between.

    Durations come from another clock and may not fit: they are truncated, those at the front first.
    """
    tail = []
    for cause, length in reversed(back):
        start = max(begin, end - max(0, length))
        tail.append(Span(start, end, cause))
        end = start
    for cause, length in front:
        stop = min(end, begin + max(0, length))
        yield Span(begin, stop, cause)
        begin = stop
    yield Span(begin, end, rest)
    yield from reversed(tail)


def cause_before(mark: str, idle: str) -> str:
    """The cause of unmeasured time before an event."""
    if mark in ("hang", "rewind"):
        return mark
    if mark in (*INTENDED_ENDS, "start", "skip") or idle in ("restart", "pause"):
        return idle
    return "restart"  # it was starting, or a step was not completed


def cause_after(mark: str, idle: str) -> str:
    """The cause of time from an event to the next step."""
    if mark in INTENDED_ENDS:
        return "pause"
    if mark == "rewind":
        return "rewind"
    return idle if mark in ("skip", "start") else "restart"


def find_attempts(records: Sequence[Record], running: bool) -> list[Attempt]:
    groups: list[list[int]] = []  # places of each attempt's records
    number = None
    for index, record in enumerate(records):
        if record.kind in BEGIN and record.fields.get("attempt") != number:
            number = record.fields.get("attempt")
            groups.append([])
        if groups and record.kind != "refused":  # recorded by an attempt before its own start event
            groups[-1].append(index)
    return [
        make_attempt([records[index] for index in group], "running" if running and group is groups[-1] else "killed")
        for group in groups
    ]


def make_attempt(records: Sequence[Record], default_end: str) -> Attempt:
    """`default_end`: how it ended, if no event says so."""
    began = [record.step for record in records if record.kind in BEGIN]
    steps = [record.step for record in records if record.kind == "step"]
    ends = [record for record in records if record.kind in (*INTENDED_ENDS, "fail", "hang")]
    return Attempt(
        number=records[0].fields.get("attempt", 0),
        begin=records[0].at,
        end=records[-1].at,
        from_step=began[-1],  # a restart precedes its resume, which has the step
        to_step=steps[-1] if steps else began[-1],
        ended=ends[0].kind if ends else default_end,
        error=next((end.fields["error"] for end in ends if end.fields.get("error")), ""),  # of a hang it comes second
    )
