"""Whether a run with an injected fault ended bitwise equal to the reference run."""

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
from .instrumented_rank import SampleLog, read_samples

TRACEBACK = re.compile(r"frame #\d+: |Exception raised from|Traceback \(most recent call last\)")
COMPARED_METRICS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "val_loss",
    "reward/mean",
    "kl_answer",
    "value/loss",
)  # fields of metrics.jsonl other than times and memory


def compare_runs(injected: Path, reference: Path, exact: bool = True) -> list[str]:
    """The differences as messages; empty if equal. Both are job folders that contain `run`."""
    try:
        return [
            *compare_curves(metric_curve(injected), metric_curve(reference), exact),
            *compare_states(load_newest_state(injected), load_newest_state(reference), exact),
            *compare_samples(read_samples(injected), read_samples(reference), exact),
            *skipped_saves(RunFolder(injected / "run").events()),
        ]
    except LMWorksError as error:
        return [str(error)]


# --- losses ---------------------------------------------------------------------------------------------


def metric_curve(folder: Path) -> dict[int, dict[str, Any]]:
    lines = read_metrics(RunFolder(folder / "run").metrics_path)
    return {line["step"]: {key: line.get(key) for key in COMPARED_METRICS} for line in lines}


def compare_curves(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]], exact: bool) -> list[str]:
    if one.keys() != other.keys():
        return [f"metrics.jsonl has the steps {sorted(one)} instead of {sorted(other)}"]
    for step in sorted(one):
        for key, value in one[step].items():
            expected = other[step][key]
            if value != expected and (exact or not is_close(value, expected)):
                return [f"step {step}: {key} is {value} instead of {expected}"]
    return []


def is_close(value: Any, expected: Any) -> bool:
    return None not in (value, expected) and math.isclose(value, expected, rel_tol=TOLERANCE)


# --- state ----------------------------------------------------------------------------------------------


def load_newest_state(folder: Path) -> dict[str, Any]:
    """All entries of the newest checkpoint, by name."""
    refusals: list[str] = []
    run = RunFolder(folder / "run")
    parts = ("model", "optim", "rng", *(("critic", "critic_optim") if run.spec().align.method == "ppo" else ()))
    state: dict[str, Any] = dict.fromkeys(parts)
    root = run.checkpoints
    found = checkpoint.load(root, state, refused=lambda _path, reason: refusals.append(reason))
    if found is None or refusals:
        raise LMWorksError(f"the last checkpoint cannot be loaded: {'; '.join(refusals) or 'there is none'}")
    plain = {key: value for key, value in found.meta.items() if key not in ("spec", "data")}
    return {"step": found.step, **flatten(state), **flatten(plain, "meta.")}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def compare_states(one: dict[str, Any], other: dict[str, Any], exact: bool) -> list[str]:
    if one.keys() != other.keys():
        return [f"the last checkpoint has other entries: {', '.join(sorted(one.keys() ^ other.keys()))}"]
    wrong = [name for name in one if not equal(one[name], other[name], exact)]
    return [f"the last checkpoint differs in {wrong[0]} (and {len(wrong) - 1} more)"] if wrong else []


def equal(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, list) and isinstance(other, list) and not exact:  # the loss history of the spike detector
        return len(one) == len(other) and all(is_close(a, b) for a, b in zip(one, other, strict=True))
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    same = torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if same or exact or not one.is_floating_point():
        return same
    return float((one - other).norm()) <= TOLERANCE * float(other.norm())


# --- samples --------------------------------------------------------------------------------------------


def compare_samples(one: dict[int, SampleLog], other: dict[int, SampleLog], exact: bool) -> list[str]:
    """On the same ranks, each must have had the same samples; on fewer ranks, all of them together."""
    if exact:
        wrong = [
            (rank, step) for rank, log in other.items() for step in log if one.get(rank, {}).get(step) != log[step]
        ]
        return [f"step {step}: rank {rank} was given other samples" for rank, step in wrong[:1]]
    steps = next(iter(other.values()))
    mixed = [step for step in steps if samples_of_step(one, step) != samples_of_step(other, step)]
    return [f"step {step}: the ranks were given other samples" for step in mixed[:1]]


def samples_of_step(logs: dict[int, SampleLog], step: int) -> list[str]:
    """The samples of a step over all ranks of its last attempt; the log of rank 0 says how many ranks there were."""
    world, rows = logs.get(0, {}).get(step, (0, []))
    return sorted([*rows, *(row for rank in range(1, world) for row in logs[rank][step][1])])


# --- saves ----------------------------------------------------------------------------------------------


def skipped_saves(events: list[dict[str, Any]]) -> list[str]:
    """A resume must start from the last recorded save, unless that checkpoint was refused with a reason."""
    last, excused = 0, False
    for event in events:
        match event["kind"]:
            case "save":
                last, excused = event["step"], False
            case "refused":
                excused = True
            case "resume" if event["step"] < last and not excused:
                return [f"step {last} was saved, but a resume continued from step {event['step']}"]
    return []


def exit_save_problem(folder: Path, output: str) -> str:
    """Ranks that lost their agent must finish the step, save it, and report why they exit, without a traceback."""
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
    stack = next((line for line in output.splitlines() if TRACEBACK.search(line)), "")
    return f"it printed a stack: {stack}" if stack else ""


def log_lines(folder: Path, output: str) -> list[str]:
    """Lines that may name the cause: the output and the recorded events."""
    events = [{**event, "time": "", "host": ""} for event in RunFolder(folder / "run").events()]
    return [*output.splitlines(), *map(json.dumps, events)]
