"""Automatic restarts: which attempt this is, the cause of the last failure, crash loops.

An agent counts its restarts in the environment: torchrun in TORCHELASTIC_RESTART_COUNT, `lmworks train --max-restarts`
in LMWORKS_RESTARTS, with the cause beside it. torchrun does not count a restart after a change of nodes; such a rank
finds its launch id in the run folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..checkpoint.format.folders import committed
from ..checkpoint.format.manifest import step_of
from ..parallel.world import launched
from ..record import RunFolder
from ..record.folder import CAUSE, RESTARTS, Attempt, attempts, crashed_twice
from ..record.jsonl import read_lines
from ..spec import RunSpec, TrainingError
from ..spec.elastic import fitted

FAILED_TWICE = "failed twice"  # prefix of the reason of a skip after a crash loop
LOCK_TIMEOUT_S = 60.0  # until a rank of the previous generation has ended and released its lock


class CrashLoop(TrainingError):
    """The same step has failed twice."""

    final = True


def restarts() -> int:
    """How often the agent has restarted its ranks; 0 for a first start, or one by hand."""
    return sum(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", RESTARTS))


def launch_id() -> str:
    """The rendezvous id of the agent; empty without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name  # torchrun's default without --rdzv-id


def is_restart(folder: RunFolder) -> bool:
    """Whether this rank was restarted for the run in `folder`."""
    if not folder.spec_path.exists():
        return False
    past = attempts(folder)
    return restarts() > 0 or bool(past and launch_id() and past[-1].launch == launch_id())


def resume_step(folder: RunFolder, step: int | None) -> int | None:
    """The step that the user chose to resume from; None if this launch has done so before.

    Ranks that are restarted with the same command resume from what they have saved since.
    """
    resumes = (event for event in folder.events() if event["kind"] == "resume")
    return None if launch_id() and any(event.get("launch") == launch_id() for event in resumes) else step


def has_rewound(folder: RunFolder) -> bool:
    """Whether checkpoints were set aside since the last line of metrics: metrics of their steps are void."""
    lines = [line["attempt"] for line in read_lines(folder.metrics_path) if isinstance(line.get("attempt"), int)]
    last = max(lines, default=-1)
    return any(event["kind"] == "set_aside" and event["attempt"] > last for event in folder.events())


def lock_timeout_s() -> float:
    """How long to wait for the lock of a run folder: a rank of the previous generation may be ending."""
    return LOCK_TIMEOUT_S if restarts() else 0.0


def fit_to_world_size(spec: RunSpec) -> RunSpec:
    """With `fault.elastic`, the spec with a layout for the world size that was started."""
    started = int(os.environ.get("WORLD_SIZE", 0)) if launched() else 0
    return fitted(spec, started) if spec.fault.elastic and started else spec


def layout_fields(spec: RunSpec) -> dict[str, Any]:
    """The layout of an attempt, for its event; spec.toml stays as it was written."""
    layout = spec.parallel
    degrees = {axis: size for axis in ("pp", "dp", "cp", "tp", "ep") if (size := getattr(layout, axis)) > 1}
    return {"launch": launch_id(), "ranks": layout.world, "layout": degrees, "accumulation": spec.accumulation}


@dataclass
class SkippedBatches:
    """Batches that crash the run: found by the step that failed, recorded by cursor.

    The cursors are in events.jsonl, so that a run which reaches them again from an older checkpoint skips them again.
    """

    cursors: dict[int, str]
    step: int = 0  # whose next batch is to be skipped; 0: none

    def contains(self, step: int, cursor: int) -> bool:
        """Whether the batch at `cursor` is to be skipped in `step`."""
        return cursor in self.cursors or step == self.step

    def skip_reason(self, step: int, cursor: int) -> str:
        """Why the batch at `cursor` is skipped in `step`, which is recorded; empty if it is not."""
        if cursor in self.cursors:
            return self.cursors[cursor]
        if step != self.step:
            return ""
        self.step = 0
        self.cursors[cursor] = f"{FAILED_TWICE} in step {step}"
        return self.cursors[cursor]


def record_restart(folder: RunFolder, attempt: int, crash_loop: str) -> SkippedBatches:
    """Record an automatic restart and its cause. A run that fails twice in the same step ends, or skips its batch.

    Only attempts of this agent count towards a crash loop: a `lmworks resume` by hand starts afresh.
    """
    skips = [event for event in folder.events() if event["kind"] == "skip"]
    skipped = SkippedBatches({e["from_cursor"]: e["reason"] for e in skips if e["reason"].startswith(FAILED_TWICE)})
    count = restarts()
    if not count:
        return skipped
    past = attempts(folder)
    last = past[-1] if past else Attempt(attempt, 0)
    cause = os.environ.get(CAUSE) or last.cause
    newest = max(map(step_of, committed(folder.checkpoints)), default=0)
    skipped.step = crashed_twice([each for each in past if each.launch == launch_id()][-count:])
    if skipped.step and crash_loop == "stop":
        raise CrashLoop(
            f"step {skipped.step} failed twice: {cause}; not restarted. Fix the cause and run "
            f"`lmworks resume {folder.path}`, or skip its batch with fault.crash_loop = 'skip'"
        )
    fields = {"attempt": attempt, "launch": launch_id(), "restarts": count, "cause": cause}
    folder.event("restart", newest, **fields, lost=max(0, last.step - newest))
    return skipped
