"""The attempts of a run: the last step of each, and why it ended.

After an automatic restart the run needs two facts: how many steps were lost, and whether the last two attempts failed
in the same step. Both are read from events.jsonl and metrics.jsonl, so they are known after any crash, under any agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .folder import RunFolder
from .jsonl import read_lines

BEGIN = ("start", "restart", "resume")
DONE = ("finish", "interrupt")  # intended ends
RESTARTS = "LMWORKS_RESTARTS"  # environment: number of restarts by the agent
CAUSE = "LMWORKS_RESTART_CAUSE"  # environment: cause of the last one
NO_ERROR_MESSAGE = "a rank ended without an error message"


@dataclass(frozen=True)
class Attempt:
    number: int
    step: int  # the last one taken, or the first
    launch: str = ""  # id of the agent that started it
    done: bool = False
    cause: str = NO_ERROR_MESSAGE  # of an unintended end
    moved: bool = field(default=False, compare=False)  # whether it took a step

    @property
    def failed_in(self) -> int:
        """The step that failed; 0 after an intended end."""
        return 0 if self.done else self.step + 1


def attempts(folder: RunFolder) -> list[Attempt]:
    """In order. One that died before its first event is unknown."""
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
            found[number] = replace(found[number], cause=event["error"] or NO_ERROR_MESSAGE)
    for line in read_lines(folder.metrics_path):  # the last line of an attempt counts: it may have rewound
        if line.get("attempt") in found:
            found[line["attempt"]] = replace(found[line["attempt"]], step=line["step"], moved=True)
    return list(found.values())


def crashed_twice(past: Sequence[Attempt]) -> int:
    """The step in which both of the last two attempts failed; 0 otherwise."""
    if len(past) < 2 or past[-1].failed_in != past[-2].failed_in:
        return 0
    return past[-1].failed_in
