"""Where a run's time went: every microsecond between its first record and its last, under one name.

metrics.jsonl and events.jsonl are laid on one line of time. A record closes the gap since the one before, and says what
it held: a step says how long it took, how long a save had held it up and, by its event, how long an evaluation took;
what is left of a gap was spent otherwise. A step counts once. One that a resume or a rewind went back behind was taken
for nothing, whether it has been taken again by now or not.
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

CAUSES = {  # what a name stands for, in the order of a table
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
MEANT = ("finish", "interrupt")
MARKS = (*BEGIN, *MEANT, "fail", "hang", "rewind", "skip")  # what closes a gap, besides a step


@dataclass(frozen=True)
class Span:
    """From `begin` to `end`, in microseconds since the first record."""

    begin: int
    end: int
    cause: str


@dataclass(frozen=True)
class Attempt:
    """One process's go at the run; times in microseconds since the first record."""

    number: int
    begin: int
    end: int  # its last sign of life
    from_step: int
    to_step: int
    ended: str  # finish, interrupt, fail, hang; killed where nothing was said; running
    error: str = ""

    @property
    def failed(self) -> bool:
        return self.ended not in (*MEANT, "running")


@dataclass(frozen=True)
class Account:
    """Of a run's time so far."""

    began: str  # ISO 8601, UTC: time 0 of all spans
    spans: list[Span]  # one after another, without a gap
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
        """The wall time in which the run was meant to run."""
        return self.wall_s - self.seconds["pause"]

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share of that time in which it did what it was meant to."""
        seconds = self.seconds
        return (seconds["useful"] + seconds["evaluation"]) / self.active_s if self.active_s else None

    @property
    def goodput(self) -> float | None:
        """Tokens a second of that time that count."""
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
    """A line of either file, at its time."""

    at: int  # microseconds since the first record
    kind: str  # "step", or that of an event
    step: int
    fields: dict[str, Any]

    def microseconds(self, key: str) -> int:
        value = self.fields.get(key)
        return round(value * 1e6) if isinstance(value, int | float) else 0


def account(folder: RunFolder) -> Account:
    began, records = read_records(folder)
    causes = find_causes(records)
    spans = [span for span in tile(records, causes) if span.end > span.begin]
    runs = [list(group) for _, group in groupby(spans, lambda span: span.cause)]
    counted = [record for place, record in enumerate(records) if record.kind == "step" and place not in causes]
    return Account(
        began,
        [Span(run[0].begin, run[-1].end, run[0].cause) for run in runs],
        find_attempts(records, folder.is_locked()),
        sum(record.fields.get("tokens") or 0 for record in counted),
    )


def read_records(folder: RunFolder) -> tuple[str, list[Record]]:
    """Both files in the order of their times; returns time 0 too."""
    steps = read_lines(folder.metrics_path)
    if any("time" not in line for line in steps):
        raise LMWorksError(f"{folder.metrics_path} has steps without a time, from before these were recorded")
    lines = [*({**line, "kind": "step"} for line in steps), *folder.events()]
    timed = sorted(((datetime.fromisoformat(line["time"]), line) for line in lines), key=in_order)
    if not timed:
        return "", []
    first = timed[0][0]
    records = [Record((time - first) // MICROSECOND, line["kind"], line["step"], line) for time, line in timed]
    return timed[0][1]["time"], records


def in_order(line: tuple[datetime, dict[str, Any]]) -> tuple[datetime, int]:
    """Of the same millisecond, what comes before the line of a step comes first, then the step, then the rest."""
    kind = line[1]["kind"]
    return line[0], 0 if kind in (*BEGIN, "eval", "overflow") else 1 if kind == "step" else 2


def find_causes(records: Sequence[Record]) -> dict[int, str]:
    """Why steps do not count, by their place among the records; those that do are left out."""
    causes: dict[int, str] = {}
    standing: list[int] = []  # places of the steps that no one has gone back behind
    overflowed = -1
    for place, record in enumerate(records):
        if record.kind == "step":
            standing.append(place)
            if record.step == overflowed:
                causes[place] = "skip"
        elif record.kind == "overflow":
            overflowed = record.step
        elif record.kind in ("start", "resume", "rewind"):
            rewound = record.kind == "rewind"
            back_to = record.fields["to_step"] if rewound else record.step
            gone = [step for step in standing if records[step].step > back_to]
            causes |= dict.fromkeys(gone, "rewind" if rewound else "replay")
            standing = [step for step in standing if records[step].step <= back_to]
    return causes


def tile(records: Sequence[Record], causes: dict[int, str]) -> Iterator[Span]:
    """The spans in order, some of them empty."""
    at, step, idle = 0, -1, "start"  # reached so far; the last step; what time between records is spent on
    evaluated = stalled = told = 0  # measured in the gap that is open: evaluations, saves; of these, told by a mark
    for place, record in enumerate(records):
        if record.kind == "eval":
            evaluated += record.microseconds("seconds")
        elif record.kind == "save" and record.step == step:  # a later one, of a background write, is in a step's line
            stalled += record.microseconds("seconds")
        elif record.kind == "step":
            cause = causes.get(place)
            saved = ("save", record.microseconds("checkpoint_s") - told)
            took = (cause or "useful", record.microseconds("step_s"))
            yield from divide(at, record.at, [saved], idle, [took, (cause or "evaluation", evaluated)])
            at, step, idle = record.at, record.step, "other"
            evaluated = stalled = told = 0
        elif record.kind in MARKS:
            back = [("evaluation", evaluated), ("skip", record.microseconds("seconds") if record.kind == "skip" else 0)]
            yield from divide(at, record.at, [("save", stalled)], before(record.kind, idle), back)
            at, idle = record.at, after(record.kind, idle)
            evaluated, stalled, told = 0, 0, 0 if record.kind in BEGIN else told + stalled
    end = records[-1].at if records else 0
    yield from divide(at, end, [("save", stalled)], idle, [("evaluation", evaluated)])


def divide(
    begin: int, end: int, front: Sequence[tuple[str, int]], rest: str, back: Sequence[tuple[str, int]]
) -> Iterator[Span]:
    """Cut a gap: what was measured at its front and at its back, (cause, microseconds) each, and the rest between.

    What was measured on another clock may not fit: it is cut short, that at the front first.
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


def before(mark: str, idle: str) -> str:
    """What the time before a mark was spent on, where nothing was measured."""
    if mark in ("hang", "rewind"):
        return mark
    if mark in (*MEANT, "start", "skip") or idle in ("restart", "pause"):
        return idle
    return "restart"  # it was starting, or a step was under way that never came to its line


def after(mark: str, idle: str) -> str:
    """What time is spent on from there on, until the next step."""
    if mark in MEANT:
        return "pause"
    if mark == "rewind":
        return "rewind"
    return idle if mark in ("skip", "start") else "restart"


def find_attempts(records: Sequence[Record], running: bool) -> list[Attempt]:
    groups: list[list[int]] = []  # places of each attempt's records
    number = None
    for place, record in enumerate(records):
        if record.kind in BEGIN and record.fields.get("attempt") != number:
            number = record.fields.get("attempt")
            groups.append([])
        if groups and record.kind != "refused":  # that is told by an attempt which has yet to say that it began
            groups[-1].append(place)
    return [
        attempt_of([records[place] for place in group], "running" if running and group is groups[-1] else "killed")
        for group in groups
    ]


def attempt_of(records: Sequence[Record], unsaid: str) -> Attempt:
    """`unsaid`: how it ended, if nothing says so."""
    began = [record.step for record in records if record.kind in BEGIN]
    steps = [record.step for record in records if record.kind == "step"]
    ends = [record for record in records if record.kind in (*MEANT, "fail", "hang")]
    return Attempt(
        number=records[0].fields.get("attempt", 0),
        begin=records[0].at,
        end=records[-1].at,
        from_step=began[-1],  # a restart comes before its resume, and knows less
        to_step=steps[-1] if steps else began[-1],
        ended=ends[0].kind if ends else unsaid,
        error=next((end.fields["error"] for end in ends if end.fields.get("error")), ""),  # that of a hang comes second
    )
