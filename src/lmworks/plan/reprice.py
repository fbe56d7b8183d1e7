"""The second price of a run, after its first steps: what was predicted, corrected part by part by what they took.

Compute and communication have a factor each, measured over predicted; waiting for data is not predicted, and is added.
Stages to come, which nobody has measured, take as much longer as they have more FLOPs. Evaluations are priced as the
forward passes that they are; saves and restarts are in no price.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..spec import RunSpec
from .predict import step_flops

WARM_UP = 2  # steps of an attempt that compile, fill caches and make optimizer states
STEPS = 10  # of an attempt, the warm-up included, after which it is priced again
WAITING = ("communication", "tp", "cp", "ep", "dp", "pp", "bubble")  # parts of a step in which ranks wait for others
FORWARD_SHARE = 1 / 3  # of a forward and a backward pass


@dataclass(frozen=True)
class SecondPrice:
    """Seconds of a step; `communication_s` is None where it was not told from compute."""

    step_s: float
    tokens_per_s: float
    compute_s: float
    data_s: float
    communication_s: float | None
    compute_factor: float | None  # measured over predicted; None: nothing was predicted
    communication_factor: float | None
    run_s: float  # all steps of the run, those that are taken as measured
    evaluations_s: float  # to come
    dollars: float | None  # of run_s; None: no price is known

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """Where a run stands when it is priced again."""

    step: int
    taken_s: float  # all steps so far
    waiting_share: float | None  # of a step's time that this rank waited for others
    evaluation_passes: int  # forward passes of one evaluation on a rank


def second_price(
    whole: RunSpec, predicted: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], now: Progress
) -> SecondPrice:
    """`whole`: all stages of the run; `predicted`: prediction.json; `steps`: lines of metrics.jsonl, past warm-up."""
    spec = whole.after(max(0, now.step - 1))
    usual = middle(steps)
    step_s, data_s = (statistics.fmean(float(step[key]) for step in usual) for key in ("step_s", "data_s"))
    waited = None if now.waiting_share is None else now.waiting_share * step_s
    compute_s = max(0.0, step_s - data_s - (waited or 0.0))
    parts = predicted.get("step_parts") or {}
    waiting = sum(seconds for name, seconds in parts.items() if name in WAITING)
    computing = sum(parts.values()) - waiting
    alone = waited is None  # compute and communication have one factor
    run_s = now.taken_s + seconds_to_come(whole, now.step, step_s)
    dollars = dollars_an_hour(spec)
    return SecondPrice(
        step_s=step_s,
        tokens_per_s=spec.tokens_per_step / step_s,
        compute_s=compute_s,
        data_s=data_s,
        communication_s=waited,
        compute_factor=ratio(compute_s, computing + waiting if alone else computing),
        communication_factor=None if waited is None else ratio(waited, waiting),
        run_s=run_s,
        evaluations_s=evaluations_to_come(spec, whole.optim.steps, now, usual),
        dollars=run_s / 3600 * dollars if dollars else None,
    )


def middle(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the fastest and the slowest, which a neighbour or the clock made."""
    ordered = sorted(steps, key=lambda step: float(step["step_s"]))
    return ordered[1:-1] if len(ordered) > 2 else ordered


def ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if predicted > 0 else None


def dollars_an_hour(spec: RunSpec) -> float:
    """Of all accelerators of a run; 0: not known."""
    gpu = spec.cluster.accelerator
    return (spec.cluster.price_hour or (gpu.price_hour if gpu else 0.0)) * spec.ranks


def seconds_to_come(whole: RunSpec, step: int, step_s: float) -> float:
    """Of the steps after `step`, of which one of this stage takes `step_s`."""
    now = step_flops(whole.after(max(0, step - 1))).hardware
    total, begin = 0.0, step
    for number, end in enumerate(whole.stage_ends()):
        if end > begin:
            stage = whole.stage(number) if whole.stages else whole
            total += (end - begin) * step_s * step_flops(stage).hardware / now
            begin = end
    return total


def evaluations_to_come(spec: RunSpec, last: int, now: Progress, steps: Sequence[Mapping[str, Any]]) -> float:
    every = spec.log.eval_every
    count = 1 + ((last - 1) // every - now.step // every if every else 0)
    passes_s = statistics.fmean(float(step["forward_backward_s"]) for step in steps)
    return count * now.evaluation_passes * FORWARD_SHARE * passes_s / spec.accumulation
