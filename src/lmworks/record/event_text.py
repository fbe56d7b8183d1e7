"""Events of a run as text, for reports and tables; programs read events.jsonl itself.

Triage of health events: whether data, numerics or the machine caused them.

    data       the batch has outlier sequences
    numbers    numerics: learning rate too high, range too small; a rerun gives the same
    machine    a rerun, or another replica, gives another result
    unclear    computed once, on ordinary data
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .formatting import binary_bytes, duration

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
    """In chronological order."""
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
    if event.get("diverged"):
        return "numbers", "ordinary data, and it stays there: optim.lr may be too high, or optim.warmup too short"
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
    why = f"rank {one} is the outlier" if one is not None else "no side has the majority"
    return Finding(event["step"], None, "corrupt", what, "machine", why, event["action"])


def rerun_finding(event: dict[str, Any]) -> Finding:
    if event["reason"] == "corruption":
        ranks = ", ".join(map(str, event["ranks"]))
        return Finding(
            event["step"], None, "rerun", "copies agree after a replay", "machine",
            f"not what ranks {ranks} had before", "continued",
        )  # fmt: skip
    loss, norm = event.get("loss"), event.get("grad_norm")
    what = f"{event['reason']}: loss {shown(loss, event, 'loss')}, gradient norm {shown(norm, event, 'grad_norm')}"
    why = f"computed again: loss {event['again'][0]:.4g}, gradient norm {event['again'][1]:.4g}"
    return Finding(event["step"], event["cursor"], "rerun", what, "machine", why, "took the second result")


def shown(value: float | None, event: dict[str, Any], key: str) -> str:
    """NaN and Inf are null in JSON, with a word beside it."""
    return event.get("nonfinite", {}).get(key, "unknown") if value is None else f"{value:.4g}"


# --- events as text --------------------------------------------------------------------------------------

Event = Mapping[str, Any]
HIDDEN = ("time", "kind", "step", "nonfinite")  # shown beside the text, or explain a null in it
ACTIONS = {
    "log": "",
    "skip": "the step was skipped",
    "rewind": "the run went back to an earlier checkpoint",
    "lower_lr": "the learning rate was lowered",
    "stop": "the run was stopped",
}


def describe_event(event: Event) -> str:
    """As text. An event of an unknown kind, or without its usual fields, is listed field by field."""
    describe = DESCRIPTIONS.get(event["kind"])
    try:
        text = describe(event) if describe else fields(event)
    except (KeyError, TypeError):
        text = fields(event)
    return " ".join(text.split())  # an error may have several lines


def fields(event: Event) -> str:
    return joined({key: value for key, value in event.items() if key not in HIDDEN}, ", ")


def joined(values: Mapping[str, Any], between: str = " ") -> str:
    return between.join(f"{key} {plain(value)}" for key, value in values.items() if value not in (None, {}, []))


def plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({joined(value, ', ')})"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def begin(event: Event) -> str:
    resumed = event["kind"] == "resume"
    what = f"attempt {event['attempt'] + 1} resumed after step {event['step']:,}" if resumed else "training began"
    if "ranks" not in event:
        return what
    layout = f" ({joined(event['layout'])})" if event["layout"] else ""
    return (
        f"{what} on {counted(event['ranks'], 'rank')}{layout}, {counted(event['accumulation'], 'micro-batch')} a step"
    )


def restart(event: Event) -> str:
    lost = f"{counted(event['lost'], 'step')} to be taken again" if event["lost"] else "no step lost"
    return f"all ranks were started again (restart {event['restarts']}), {lost}: {event['cause']}"


def evaluation(event: Event) -> str:
    what = f"reward {event['reward']:.4f}" if "reward" in event else f"validation loss {event['val_loss']:.4f}"
    over = counted(event["tokens"], event.get("unit", "token"))
    return f"{what} over {over}, in {duration(event['seconds'])}"


def save(event: Event) -> str:
    size = f" ({binary_bytes(event['bytes'])})" if "bytes" in event else ""
    behind = f", written in the background in {duration(event['write_s'])}" if event.get("write_s") else ""
    return f"saved {event['path']}{size}; training waited {duration(event['seconds'])}{behind}"


def describe_bad_step(event: Event) -> str:
    """A spike, NaN or Inf."""
    odd = outlier_sample(event)
    parts = [event["what"], odd, ACTIONS[event["action"]]]
    return "; ".join(part for part in parts if part)


def rerun(event: Event) -> str:
    if event["transient"]:
        found = rerun_finding(dict(event))
        return f"{found.what}; {found.why}; {found.action}"
    return f"the step was computed again ({event['reason']}), with the same result"


def corrupt(event: Event) -> str:
    found = replica_finding(dict(event))
    parts = [found.what, found.why, ACTIONS.get(event["action"], event["action"])]
    return "; ".join(part for part in parts if part)


def skip(event: Event) -> str:
    return f"skipped windows {event['from_cursor']} to {event['to_cursor'] - 1} ({event['reason']})"


def rewind(event: Event) -> str:
    return f"went back from step {event['from_step']} to step {event['to_step']} ({event['reason']})"


def lower_lr(event: Event) -> str:
    until = f"up to step {event['until']}" if event["until"] else "to the end"
    return f"learning rate × {event['factor']:g} {until} ({event['reason']})"


def straggler(event: Event) -> str:
    where = f"rank {event['rank']}" + (f" on {event['host']}" if event["host"] else "")
    return f"{where} keeps up again" if event["recovered"] else f"{where} is slow: {event['ratio']:g} × as long busy"


def hang(event: Event) -> str:
    ranks = ", ".join(map(str, event["ranks"]))
    return f"ranks waited for one another ({event['cause']}), because of rank {ranks}; reports: {event['reports']}"


def early_stop(event: Event) -> str:
    if "kl" in event:
        kl, limit = event["kl"], event["limit"]
        return f"ended early: the KL divergence of an answer is {kl:.3g}, and align.kl_stop = {limit:g}"
    return (
        f"ended early: the reward of held-out prompts has not risen above {event['best']:.4g} for "
        f"{counted(event['evaluations'], 'evaluation')}, that of training prompts went from "
        f"{event['training_at_best']:.4g} to {event['training']:.4g}"
    )


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "es" if word.endswith("ch") else "s")


DESCRIPTIONS: Mapping[str, Callable[[Event], str]] = {
    "start": begin,
    "resume": begin,
    "restart": restart,
    "eval": evaluation,
    "save": save,
    "save_failed": lambda event: f"{event['path']} could not be saved: {event['error']}",
    "copy": lambda event: f"copied {event['path']} to {event['remote']} in {duration(event['seconds'])}",
    "copy_failed": lambda event: f"{event['path']} could not be copied to {event['remote']}: {event['error']}",
    "refused": lambda event: f"checkpoint {event['path']} was refused: {event['reason']}",
    "set_aside": lambda event: (
        f"checkpoints of steps {', '.join(map(str, event['steps']))} were moved to {event['path']}: "
        f"the run continues from step {event['step']}"
    ),
    "overflow": lambda event: (
        f"fp16 overflow: the step was left out; loss scale {event['loss_scale']:g} → {event['next_scale']:g}"
    ),
    "spike": describe_bad_step,
    "fault": describe_bad_step,
    "rerun": rerun,
    "corrupt": corrupt,
    "skip": skip,
    "rewind": rewind,
    "lower_lr": lower_lr,
    "straggler": straggler,
    "profile": lambda event: (
        f"steps {event['first']} to {event['last']} are profiled on {counted(len(event['ranks']), 'rank')}"
    ),
    "hang": hang,
    "examples": lambda event: (
        f"{event['examples']:,} examples of {event['path']}, {event['trained_tokens']:,} tokens of them trained"
        + (f"; left out: {left_out(event['left_out'])}" if event["left_out"] else "")
    ),
    "sampler_mismatch": lambda event: (
        f"log-probabilities of trainer and engine differ by {event['difference']:.2g} on average, "
        f"more than {event['limit']:g}"
    ),
    "environment_failed": lambda event: (
        f"the environment failed in {event['share']:.1%} of the episodes"
        + (f": {event['error']}" if event["error"] else "")
    ),
    "early_stop": early_stop,
    "interrupt": lambda event: f"stopped: {event['error']}" if event.get("error") else "stopped",
    "pause": lambda event: f"paused after {counted(event['step'], 'step')}, as asked",
    "fork": lambda event: f"begun from step {event['step']:,} of {event['parent']}",
    "fail": lambda event: f"failed: {event['error']}",
    "finish": lambda event: f"finished after {counted(event['step'], 'step')}",
}


def left_out(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
