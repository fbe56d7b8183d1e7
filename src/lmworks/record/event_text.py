"""Events of a run as text, for reports and tables; programs read events.jsonl itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .formatting import binary_bytes, duration
from .triage import outlier_sample, replica_finding, rerun_finding

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
    what = f"attempt {event['attempt'] + 1} went on after step {event['step']:,}" if resumed else "training began"
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
    return f"validation loss {event['val_loss']:.4f} over {event['tokens']:,} tokens, in {duration(event['seconds'])}"


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
        f"the run goes on from step {event['step']}"
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
    "hang": hang,
    "interrupt": lambda event: f"stopped: {event['error']}" if event.get("error") else "stopped",
    "fail": lambda event: f"failed: {event['error']}",
    "finish": lambda event: f"finished after {counted(event['step'], 'step')}",
}
