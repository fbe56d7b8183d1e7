"""All figures of a job's traces: those of `trace.summary`, and of our own runs what the planner says beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..spec import RunSpec
from ..trace.model import Trace
from ..trace.own_runs import recorded_spec
from ..trace.summary import summarise
from .predicted_ops import predicted_ops
from .schedule_bubble import with_schedule


def trace_facts(traces: Sequence[Trace], spec: RunSpec | None = None) -> tuple[dict[str, Any], RunSpec | None]:
    """The figures, and the run's spec: as the traces hold it, else the given one."""
    spec = recorded_spec(traces) or spec
    facts = summarise(traces)
    facts["pipeline"] = with_schedule(facts["pipeline"], spec)
    return {**facts, "predicted": predicted_ops(traces)}, spec
