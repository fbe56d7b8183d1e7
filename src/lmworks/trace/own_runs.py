"""The spec of the run that a trace is of, where the run is one of ours."""

from __future__ import annotations

from collections.abc import Sequence

from ..spec import RunSpec, SpecError
from .model import Trace


def recorded_spec(traces: Sequence[Trace]) -> RunSpec | None:
    """As the traces hold it; None of other programs, and of versions whose specs had other keys."""
    for trace in traces:
        try:
            return RunSpec.from_dict(trace.about["spec"])
        except (KeyError, SpecError, TypeError, ValueError):
            continue
    return None
