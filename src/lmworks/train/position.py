"""The position of a run, and the recorder of its events: what the parts of a trainer share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..record import RunFolder


@dataclass(frozen=True)
class Position:
    """Where a run is, in steps and in data."""

    step: int  # optimizer steps taken
    cursor: int  # position in the data: steps taken + batches skipped on purpose


@dataclass(frozen=True)
class EventRecorder:
    """Writes events of the run folder, on rank 0."""

    folder: RunFolder
    lead: bool

    def event(self, kind: str, step: int, **fields: Any) -> None:
        if self.lead:
            self.folder.event(kind, step, **fields)


def skip_data(at: Position, cursor: int, reason: str, recorder: EventRecorder, **fields: float) -> Position:
    """Do not train on the batches from the position's cursor up to `cursor`."""
    recorder.event("skip", at.step + 1, from_cursor=at.cursor, to_cursor=cursor, reason=reason, **fields)
    return replace(at, cursor=cursor)
