"""The optimal checkpoint interval by Young and Daly, on measured times, beside the one in use."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from ..plan.reliability import Recovery, best_steps, ettr, young
from ..record import RunFolder
from ..record.run_summary import Summary
from ..spec import SpecError
from .goodput import TimeBreakdown


@dataclass(frozen=True)
class Interval:
    """Measured medians and the intervals that follow. ETTR is that of a long run with the same failure rate."""

    recovery: Recovery
    observed: bool  # whether the MTBF is the run's own
    step_s: float
    steps: int  # between two saves, in use; 0: only after the last step
    best_steps: int

    @property
    def ettr(self) -> float | None:
        return float(ettr(self.steps * self.step_s, self.recovery)) if self.steps else None

    @property
    def best_ettr(self) -> float:
        return float(ettr(self.best_steps * self.step_s, self.recovery))

    def to_dict(self) -> dict[str, Any]:
        young_s = float(young(self.recovery.stall_s, self.recovery.mtbf_s))
        return {
            "mtbf_s": self.recovery.mtbf_s,
            "mtbf_observed": self.observed,
            "stall_s": self.recovery.stall_s,
            "write_s": self.recovery.write_s,
            "restart_s": self.recovery.restart_s,
            "step_s": self.step_s,
            "steps": self.steps,
            "ettr": self.ettr,
            "best_steps": self.best_steps,
            "best_ettr": self.best_ettr,
            "young_s": young_s,
        }


def measured_recovery(folder: RunFolder, time_breakdown: TimeBreakdown, mtbf_h: float | None = None) -> Recovery | None:
    """Times of saves and restarts of this run; `mtbf_h` replaces its own mean time between failures.

    None without a save, and without both a failure and `mtbf_h`.
    """
    if mtbf_h is not None and mtbf_h <= 0:
        raise SpecError(f"--mtbf {mtbf_h:g}: give hours between two failures, more than 0")
    saves = [event for event in folder.events() if event["kind"] == "save" and event.get("seconds")]
    if not saves or (mtbf_h is None and not time_breakdown.failures):
        return None
    seconds = time_breakdown.seconds
    restarts = sum(
        attempt.ended != "finish" for attempt in time_breakdown.attempts[:-1]
    )  # after that there is nothing to start
    up = time_breakdown.active_s - seconds["restart"] - seconds["hang"]
    return Recovery(
        mtbf_s=mtbf_h * 3600 if mtbf_h is not None else up / time_breakdown.failures,
        stall_s=statistics.median(save["seconds"] for save in saves),
        write_s=statistics.median(save.get("write_s", 0.0) for save in saves),
        restart_s=seconds["restart"] / restarts if restarts else seconds["start"],
        detect_s=seconds["hang"] / time_breakdown.failures if time_breakdown.failures else 0.0,
    )


def interval(
    folder: RunFolder, summary: Summary, time_breakdown: TimeBreakdown, mtbf_h: float | None = None
) -> Interval | None:
    """None without a step, a save or a failure."""
    recovery = measured_recovery(folder, time_breakdown, mtbf_h)
    if recovery is None or not summary.step_s:
        return None
    best = best_steps(summary.step_s, recovery)
    return Interval(recovery, mtbf_h is None, summary.step_s, folder.spec().checkpoint.every, best)
