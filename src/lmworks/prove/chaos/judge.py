"""Whether a run that was struck ended where the one that was not ended, to the last bit."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import checkpoint
from ...record import RunFolder, read_metrics
from ...spec import LMWorksError
from .faults import TOLERANCE
from .rank import Log, read_samples

STACK = re.compile(r"frame #\d+: |Exception raised from|Traceback \(most recent call last\)")
CURVE = ("loss", "lr", "grad_norm", "tokens", "val_loss")  # what a line of metrics.jsonl has that is not time or memory


def losses_of(struck: Path, straight: Path, exact: bool = True) -> list[str]:
    """What was lost, in words; nothing if nothing was. Both are folders of jobs, with `run` in them."""
    try:
        return [
            *compare_curves(curve(struck), curve(straight), exact),
            *compare_states(saved(struck), saved(straight), exact),
            *compare_samples(read_samples(struck), read_samples(straight), exact),
            *forgotten_saves(RunFolder(struck / "run").events()),
        ]
    except LMWorksError as error:
        return [str(error)]


# --- losses ---------------------------------------------------------------------------------------------


def curve(folder: Path) -> dict[int, dict[str, Any]]:
    lines = read_metrics(RunFolder(folder / "run").metrics_path)
    return {line["step"]: {key: line.get(key) for key in CURVE} for line in lines}


def compare_curves(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]], exact: bool) -> list[str]:
    if one.keys() != other.keys():
        return [f"metrics.jsonl has the steps {sorted(one)} instead of {sorted(other)}"]
    for step in sorted(one):
        for key, value in one[step].items():
            expected = other[step][key]
            if value != expected and (exact or not near(value, expected)):
                return [f"step {step}: {key} is {value} instead of {expected}"]
    return []


def near(value: Any, expected: Any) -> bool:
    return None not in (value, expected) and math.isclose(value, expected, rel_tol=TOLERANCE)


# --- state ----------------------------------------------------------------------------------------------


def saved(folder: Path) -> dict[str, Any]:
    """All that the newest checkpoint holds, by name."""
    refusals: list[str] = []
    state: dict[str, Any] = {"model": None, "optim": None, "rng": None}
    root = RunFolder(folder / "run").checkpoints
    found = checkpoint.load(root, state, refused=lambda _path, reason: refusals.append(reason))
    if found is None or refusals:
        raise LMWorksError(f"the last checkpoint cannot be loaded: {'; '.join(refusals) or 'there is none'}")
    plain = {key: value for key, value in found.meta.items() if key not in ("spec", "data")}
    return {"step": found.step, **flat(state), **flat(plain, "meta.")}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def compare_states(one: dict[str, Any], other: dict[str, Any], exact: bool) -> list[str]:
    if one.keys() != other.keys():
        return [f"the last checkpoint has other entries: {', '.join(sorted(one.keys() ^ other.keys()))}"]
    wrong = [name for name in one if not equal(one[name], other[name], exact)]
    return [f"the last checkpoint differs in {wrong[0]} (and {len(wrong) - 1} more)"] if wrong else []


def equal(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, list) and isinstance(other, list) and not exact:  # the losses that a run remembers
        return len(one) == len(other) and all(near(a, b) for a, b in zip(one, other, strict=True))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if same or exact or not one.is_floating_point():
        return same
    return float((one - other).norm()) <= TOLERANCE * float(other.norm())


# --- samples --------------------------------------------------------------------------------------------


def compare_samples(one: dict[int, Log], other: dict[int, Log], exact: bool) -> list[str]:
    """On the same ranks, each must have been given the same; on fewer, all of them together."""
    if exact:
        wrong = [
            (rank, step) for rank, log in other.items() for step in log if one.get(rank, {}).get(step) != log[step]
        ]
        return [f"step {step}: rank {rank} was given other samples" for rank, step in wrong[:1]]
    steps = next(iter(other.values()))
    mixed = [step for step in steps if of_all(one, step) != of_all(other, step)]
    return [f"step {step}: the ranks were given other samples" for step in mixed[:1]]


def of_all(logs: dict[int, Log], step: int) -> list[str]:
    """The samples of a step on all ranks that took it at last; rank 0 is one of them, and knows how many there were."""
    world, rows = logs.get(0, {}).get(step, (0, []))
    return sorted([*rows, *(row for rank in range(1, world) for row in logs[rank][step][1])])


# --- saves ----------------------------------------------------------------------------------------------


def forgotten_saves(events: list[dict[str, Any]]) -> list[str]:
    """A resume goes on from the last save that was announced, unless it says what is wrong with that one."""
    last, excused = 0, False
    for event in events:
        match event["kind"]:
            case "save":
                last, excused = event["step"], False
            case "refused":
                excused = True
            case "resume" if event["step"] < last and not excused:
                return [f"step {last} was saved, but a resume went on from step {event['step']}"]
    return []


def broken_promise(folder: Path, said: str) -> str:
    """Of a job whose ranks were left alone: they take their step, save it, and say in plain words why they end."""
    first: list[dict[str, Any]] = []
    for event in RunFolder(folder / "run").events():
        if event["kind"] == "resume":
            break
        first.append(event)
    end = first[-1]
    if end["kind"] == "finish":  # it was the last step
        return ""
    if end["kind"] != "interrupt":
        return f"the job ended with {end['kind']!r} instead of a save: {end.get('error', '')}"
    if not any(event["kind"] == "save" and event["step"] == end["step"] for event in first):
        return f"step {end['step']} was taken and not saved"
    stack = next((line for line in said.splitlines() if STACK.search(line)), "")
    return f"it printed a stack: {stack}" if stack else ""


def evidence(folder: Path, said: str) -> list[str]:
    """Lines in which a cause may be named: what was printed, and what was recorded."""
    events = [{**event, "time": "", "host": ""} for event in RunFolder(folder / "run").events()]
    return [*said.splitlines(), *map(json.dumps, events)]
