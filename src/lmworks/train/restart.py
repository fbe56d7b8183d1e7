"""Starting again by itself: which start this is, what the one before left, and when to give up.

An agent says in the environment that it starts ranks again: torchrun in TORCHELASTIC_RESTART_COUNT, and `lmworks train
--max-restarts` in LMWORKS_RESTARTS, with the cause beside it. torchrun does not count a start over because nodes came
or went; such a rank finds the launch that it belongs to in the run folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..checkpoint.format.folders import committed
from ..checkpoint.format.manifest import step_of
from ..parallel.world import launched
from ..record import RunFolder
from ..record.attempts import CAUSE, RESTARTS, Attempt, attempts, crashed_twice
from ..record.jsonl import read_lines
from ..spec import RunSpec, TrainingError
from ..spec.elastic import fitted

FAILED_TWICE = "failed twice"  # how the reason of a skip begins that a crash loop led to
LOCK_PATIENCE_S = 60.0  # for a rank of the generation before to end, and its lock with it


class CrashLoop(TrainingError):
    """The same step has failed twice, so it would fail again."""

    final = True


def restarts() -> int:
    """How often the agent of this process has started ranks over; 0 for a first start, or one by hand."""
    return sum(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", RESTARTS))


def launch() -> str:
    """The name of what started this rank; empty where it has none of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # what torchrun calls every job that was given no --rdzv-id


def begun(folder: RunFolder) -> bool:
    """Whether the run in `folder` is the one that this rank was started again for."""
    if not folder.spec_path.exists():
        return False
    past = attempts(folder)
    return restarts() > 0 or bool(past and launch() and past[-1].launch == launch())


def chosen_step(folder: RunFolder, step: int | None) -> int | None:
    """The step that a resume was told to begin at; None where this launch has begun there before.

    Ranks that are started over with the same command go on from what they have saved since.
    """
    begun = (event for event in folder.events() if event["kind"] == "resume")
    return None if launch() and any(event.get("launch") == launch() for event in begun) else step


def has_rewound(folder: RunFolder) -> bool:
    """Whether checkpoints were set aside since the last line of metrics: those of their steps are void."""
    lines = [line["attempt"] for line in read_lines(folder.metrics_path) if isinstance(line.get("attempt"), int)]
    last = max(lines, default=-1)
    return any(event["kind"] == "set_aside" and event["attempt"] > last for event in folder.events())


def patience_s() -> float:
    """How long to wait for a folder that is in use: by a rank of the generation before, which is ending."""
    return LOCK_PATIENCE_S if restarts() else 0.0


def over_started(spec: RunSpec) -> RunSpec:
    """The run laid over the ranks that were started, where these are fewer and `fault.elastic` allows it."""
    started = int(os.environ.get("WORLD_SIZE", 0)) if launched() else 0
    return fitted(spec, started) if spec.fault.elastic and started else spec


def who_runs(spec: RunSpec) -> dict[str, Any]:
    """What an attempt runs on; the folder's spec.toml stays as it was written."""
    layout = spec.parallel
    degrees = {axis: size for axis in ("pp", "dp", "cp", "tp", "ep") if (size := getattr(layout, axis)) > 1}
    return {"launch": launch(), "ranks": layout.world, "layout": degrees, "accumulation": spec.accumulation}


@dataclass
class Detours:
    """The batches that a run passes by, for they would end it: found by the step that died, remembered by cursor.

    The cursors are in events.jsonl, so that a run which comes there again, from an older checkpoint, passes them again.
    """

    cursors: dict[int, str]
    step: int = 0  # whose next batch is to be passed by; 0: none

    def due(self, step: int, cursor: int) -> bool:
        """Whether `around` has something to say."""
        return cursor in self.cursors or step == self.step

    def around(self, step: int, cursor: int) -> str:
        """Why the batch at `cursor` is not to be used for `step`; empty where it is."""
        if cursor in self.cursors:
            return self.cursors[cursor]
        if step != self.step:
            return ""
        self.step = 0
        self.cursors[cursor] = f"{FAILED_TWICE} in step {step}"
        return self.cursors[cursor]


def note_restart(folder: RunFolder, attempt: int, crash_loop: str) -> Detours:
    """Record that ranks were started over, by themselves, and why. A run that dies in one step again and again ends.

    Only what this agent has started counts towards a crash loop: before a `lmworks resume` by hand something has been
    mended, one hopes.
    """
    skips = [event for event in folder.events() if event["kind"] == "skip"]
    detours = Detours({e["from_cursor"]: e["reason"] for e in skips if e["reason"].startswith(FAILED_TWICE)})
    count = restarts()
    if not count:
        return detours
    past = attempts(folder)
    last = past[-1] if past else Attempt(attempt, 0)
    cause = os.environ.get(CAUSE) or last.cause
    newest = max(map(step_of, committed(folder.checkpoints)), default=0)
    detours.step = crashed_twice([each for each in past if each.launch == launch()][-count:])
    if detours.step and crash_loop == "stop":
        raise CrashLoop(
            f"step {detours.step} failed twice: {cause}; not started again. Mend the cause and go on with "
            f"`lmworks resume {folder.path}`, or pass its batch by with fault.crash_loop = 'skip'"
        )
    fields = {"attempt": attempt, "launch": launch(), "restarts": count, "cause": cause}
    folder.event("restart", newest, **fields, lost=max(0, last.step - newest))
    return detours
