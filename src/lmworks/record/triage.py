"""Triage of health events: whether data, numerics or the machine caused them.

data       the batch has outlier sequences
numbers    numerics: learning rate too high, range too small; a rerun gives the same
machine    a rerun, or another replica, gives another result
unclear    computed once, on ordinary data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OUTLIER_Z = 5.0  # robust z-score of the entropy from which a sequence is an outlier


@dataclass(frozen=True)
class Finding:
    step: int
    cursor: int | None
    kind: str  # of the event
    what: str
    cause: str  # data, numbers, machine or unclear
    why: str
    action: str  # what the run did about it


def findings(events: Sequence[dict[str, Any]]) -> list[Finding]:
    """In order of time."""
    again = {event["step"]: event for event in events if event["kind"] == "rerun"}
    found = []
    for event in events:
        if event["kind"] in ("spike", "fault"):
            found.append(step_finding(event, again.get(event["step"])))
        elif event["kind"] == "corrupt":
            found.append(replica_finding(event))
        elif event["kind"] == "rerun" and event["transient"]:
            found.append(rerun_finding(event))
    return found


def step_finding(event: dict[str, Any], again: dict[str, Any] | None) -> Finding:
    cause, why = cause_of(event, again)
    return Finding(
        event["step"], event["cursor"], event["kind"], event.get("what", event["kind"]), cause, why, event["action"]
    )


def cause_of(event: dict[str, Any], again: dict[str, Any] | None) -> tuple[str, str]:
    if event.get("transient"):
        return "machine", "computed again, it was finite"
    if odd := outlier_sample(event):
        return "data", odd
    if "values" in event:  # of a state tensor, checked before a save
        return "unclear", "found before a save: the update made it, or the machine"
    if event["kind"] == "fault":
        return "numbers", "the same when computed again, on ordinary data"
    if again is not None:
        return "numbers", "the same when computed again (health.rerun), on ordinary data"
    return "unclear", "ordinary data; with health.rerun = true it would have been computed again"


def outlier_sample(event: Mapping[str, Any]) -> str:
    """The strongest outlier sequence of the batch; empty without one."""
    data = event.get("data") or {}
    for row in data.get("odd", ()):
        if abs(row["z"]) >= OUTLIER_Z:
            bits, usual = row["entropy_bits"], data["usual_bits"]
            return f"sample {row['sample']} has {bits:.2f} bits a token, usual is {usual:.2f}"
    return ""


def replica_finding(event: dict[str, Any]) -> Finding:
    names = event["parameters"]
    what = f"copies on ranks {', '.join(map(str, event['copies']))} differ in {names[0]}"
    what += f" and {len(names) - 1} more" if len(names) > 1 else ""
    one = event["rank"]
    why = f"rank {one} is the odd one" if one is not None else "no side has the majority"
    return Finding(event["step"], None, "corrupt", what, "machine", why, event["action"])


def rerun_finding(event: dict[str, Any]) -> Finding:
    if event["reason"] == "corruption":
        ranks = ", ".join(map(str, event["ranks"]))
        return Finding(
            event["step"], None, "rerun", "copies agree after a replay", "machine",
            f"not what ranks {ranks} had before", "went on",
        )  # fmt: skip
    loss, norm = event.get("loss"), event.get("grad_norm")
    what = f"{event['reason']}: loss {shown(loss, event, 'loss')}, gradient norm {shown(norm, event, 'grad_norm')}"
    why = f"computed again: loss {event['again'][0]:.4g}, gradient norm {event['again'][1]:.4g}"
    return Finding(event["step"], event["cursor"], "rerun", what, "machine", why, "took the second result")


def shown(value: float | None, event: dict[str, Any], key: str) -> str:
    """NaN and Inf are null in JSON, with a word beside it."""
    return event.get("nonfinite", {}).get(key, "unknown") if value is None else f"{value:.4g}"
