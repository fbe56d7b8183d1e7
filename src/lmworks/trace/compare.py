"""Two recordings side by side: what became faster or slower, by part of the step, cause of idleness, op, collective.

All times are means of one step of one rank, so recordings of different lengths and world sizes compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .hotspots import hotspots
from .model import Trace
from .nesting import Nesting
from .summary import PARTS, summarise

TOP = 20  # ops


@dataclass(frozen=True)
class Change:
    name: str
    before_s: float
    after_s: float

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "change_s": self.change_s}


def compare(before: Sequence[Trace], after: Sequence[Trace]) -> dict[str, Any]:
    sides = [summarise(before), summarise(after)]
    ops = [per_step(sides[0], op_seconds(before)), per_step(sides[1], op_seconds(after))]
    step, *rows = changes([means(side) for side in sides])
    ranges = [step_range(side) for side in sides]
    return {
        "step": step.to_dict(),
        "speedup": step.before_s / step.after_s if step.after_s else None,
        "before_range_s": ranges[0],
        "after_range_s": ranges[1],
        "apart": ranges[0][1] < ranges[1][0] or ranges[1][1] < ranges[0][0],
        "parts": to_dicts(rows),
        "idle_by_cause": to_dicts(changes([per_step(side, side["idle_by_cause"]) for side in sides])),
        "collectives": to_dicts(changes([per_step(side, collective_seconds(side)) for side in sides])),
        "ops": to_dicts(largest(changes(ops))),
        "launches": [mean(one["per_step"] for one in side["launches"]) for side in sides],
    }


def means(facts: Mapping[str, Any]) -> dict[str, float]:
    return per_step(facts, {"step": facts["step_s"], **{part: facts[f"{part}_s"] for part in PARTS}})


def per_step(facts: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, float]:
    count = max(1, len(facts["steps"]))
    return {name: length / count for name, length in seconds.items()}


def collective_seconds(facts: Mapping[str, Any]) -> dict[str, float]:
    """What was not hidden, by collective and group."""
    found: defaultdict[str, float] = defaultdict(float)
    for one in facts["overlap"]["collectives"]:
        found[f"{one['collective']} {one['group']}".strip()] += one["exposed_s"]
    return found


def op_seconds(traces: Sequence[Trace]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for trace in traces:
        for one in hotspots(trace, Nesting.of(trace)):
            found[one.op] += one.seconds
    return found


def changes(sides: Sequence[Mapping[str, float]]) -> list[Change]:
    """In the order of the first, then what only the second has."""
    before, after = sides
    return [Change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in dict.fromkeys((*before, *after))]


def largest(found: Iterable[Change]) -> list[Change]:
    return sorted(found, key=lambda one: -abs(one.change_s))[:TOP]


def to_dicts(found: Iterable[Change]) -> list[dict[str, Any]]:
    return [one.to_dict() for one in found]


def step_range(facts: Mapping[str, Any]) -> tuple[float, float]:
    """The shortest and the longest step, each a mean over its ranks."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for row in facts["steps"]:
        by_step[row["step"]].append(row["seconds"])
    lengths = [mean(seconds) for seconds in by_step.values()] or [0.0]
    return min(lengths), max(lengths)


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
