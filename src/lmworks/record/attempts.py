"""The attempts at a run, read from what it has left: how far each came, and what ended it.

A run that is started again by itself must know two things of the attempt before: what it lost, and whether it died in
the same step as the one before that. Everything is read from events.jsonl and metrics.jsonl, so it is known after any
death, and to any kind of agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .folder import RunFolder
from .jsonl import read_lines

BEGIN = ("start", "restart", "resume")
DONE = ("finish", "interrupt")  # ends that were meant
RESTARTS = "LMWORKS_RESTARTS"  # in which an agent tells ranks how often it has started them over
CAUSE = "LMWORKS_RESTART_CAUSE"  # and why, the last time
NO_WORD = "a rank ended without a word"


@dataclass(frozen=True)
class Attempt:
    number: int
    step: int  # the last one it took, or where it began
    launch: str = ""  # of the agent that started it
    done: bool = False
    cause: str = NO_WORD  # of its end, where that was not meant
    moved: bool = field(default=False, compare=False)  # whether it took a step

    @property
    def failed_in(self) -> int:
        """The step that it did not get through; 0 where it ended as it should."""
        return 0 if self.done else self.step + 1


def attempts(folder: RunFolder) -> list[Attempt]:
    """All of them, in order. One that died before its first event has left nothing, and is not known."""
    found: dict[int, Attempt] = {}
    number = None
    for event in folder.events():
        kind = event["kind"]
        if kind in BEGIN and isinstance(event.get("attempt"), int):
            number = event["attempt"]
            found[number] = Attempt(number, event["step"], event.get("launch", ""))
        elif number is not None and kind in DONE:
            found[number] = replace(found[number], done=True)
        elif number is not None and kind == "fail":
            found[number] = replace(found[number], cause=event["error"] or NO_WORD)
    for line in read_lines(folder.metrics_path):  # the last line of an attempt counts: it may have gone back
        if line.get("attempt") in found:
            found[line["attempt"]] = replace(found[line["attempt"]], step=line["step"], moved=True)
    return list(found.values())


def crashed_twice(past: Sequence[Attempt]) -> int:
    """The step in which both of the last two attempts died; 0 where there is none."""
    if len(past) < 2 or past[-1].failed_in != past[-2].failed_in:
        return 0
    return past[-1].failed_in
