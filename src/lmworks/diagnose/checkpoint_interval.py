"""How often a run saves, how often it should, and what the difference costs: Young and Daly on measured times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from ..plan.reliability import Recovery, best_steps, ettr, young
from ..record import RunFolder
from ..record.run_summary import Summary
from ..spec import SpecError
from .goodput import Account


@dataclass(frozen=True)
class Interval:
    """Measured medians, and what follows from them. An ETTR here is that of a long run with such stops."""

    recovery: Recovery
    observed: bool  # whether the mean time between stops is the run's own
    step_s: float
    steps: int  # between two saves, in use; 0: only after the last
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


def measured(folder: RunFolder, account: Account, mtbf_h: float | None = None) -> Recovery | None:
    """What saves and stops take of this run; `mtbf_h` hours between stops, where it has had none, or is to have others.

    None where the run has not saved yet, or not stopped, and no hours are given.
    """
    if mtbf_h is not None and mtbf_h <= 0:
        raise SpecError(f"--mtbf {mtbf_h:g}: give hours between two stops, more than 0")
    saves = [event for event in folder.events() if event["kind"] == "save" and event.get("seconds")]
    if not saves or (mtbf_h is None and not account.failures):
        return None
    seconds = account.seconds
    again = sum(attempt.ended != "finish" for attempt in account.attempts[:-1])  # after that there is nothing to start
    up = account.active_s - seconds["restart"] - seconds["hang"]
    return Recovery(
        mtbf_s=mtbf_h * 3600 if mtbf_h is not None else up / account.failures,
        stall_s=statistics.median(save["seconds"] for save in saves),
        write_s=statistics.median(save.get("write_s", 0.0) for save in saves),
        restart_s=seconds["restart"] / again if again else seconds["start"],
        detect_s=seconds["hang"] / account.failures if account.failures else 0.0,
    )


def interval(folder: RunFolder, summary: Summary, account: Account, mtbf_h: float | None = None) -> Interval | None:
    """None where too little is known: no step, no save, or no stop."""
    recovery = measured(folder, account, mtbf_h)
    if recovery is None or not summary.step_s:
        return None
    best = best_steps(summary.step_s, recovery)
    return Interval(recovery, mtbf_h is None, summary.step_s, folder.spec().checkpoint.every, best)
