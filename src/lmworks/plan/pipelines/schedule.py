"""A pipeline's schedule in time, followed action by action; plan/pipelines/bubble.py has it in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .orders import Action

Times = Mapping[str, float]  # seconds of each kind of work (F, B, I, W) of one stage, one micro-batch


class Span(NamedTuple):
    """One piece of work: a stage's forward or backward pass of one micro-batch."""

    rank: int
    stage: int
    kind: str  # F, B, I or W: forward, backward, backward for inputs or for weights
    micro_batch: int
    begin: float
    end: float


def durations(recompute: str = "none") -> dict[str, float]:
    """Of each kind of work in forward passes of one stage: F = I = W, and a whole backward pass B is both its halves.

    With recompute the backward pass is never split (all of it is in I), and `full` runs the stage forward once more,
    `mlp` about half of it.
    """
    if recompute == "none":
        return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    whole = {"full": 3.0, "mlp": 2.5}.get(recompute, 2.0)
    return {"F": 1.0, "B": whole, "I": whole, "W": 0.0}


def stage_times(times: Times, costs: Sequence[float]) -> list[Times]:
    """Of every stage: `times` by its cost.

    The first stage has no inputs that want a gradient: PyTorch runs its whole backward pass in W, nothing in I.
    """
    first, *others = [{kind: cost * seconds for kind, seconds in times.items()} for cost in costs]
    return [first | ({"I": 0.0, "W": first["B"]} if times["W"] else {}), *others]


def simulate(orders: Sequence[Sequence[Action]], stages: Sequence[Times], send: float = 0.0) -> list[Span]:
    """Every rank takes its actions in order, each as soon as what it needs is there.

    `stages` are the times of each stage, `send` the seconds between the end of a stage and the arrival of what it
    made on another rank; a message holds up nobody but its receiver.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    last, ranks = len(stages) - 1, range(len(orders))
    away = [0.0, *(send if rank_of[stage] != rank_of[stage + 1] else 0.0 for stage in range(last)), 0.0]  # of borders
    there: dict[tuple[int, str, int], float] = {}  # (stage, F or I, micro-batch) → when the next stage has it
    waiting: dict[tuple[int, str, int], int] = {}  # what a rank waits for → that rank
    position, free = [0 for _ in ranks], [0.0 for _ in ranks]
    spans: list[Span] = []
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        order, now = orders[rank], free[rank]
        while position[rank] < len(order):
            stage, kind, i = order[position[rank]]
            need = depends_on(stage, kind, i, last)
            begin = now
            if need:
                if need not in there:
                    waiting[need] = rank
                    break
                if kind != "W":
                    begin = max(now, there[need])
            now = begin + stages[stage][kind]
            spans.append(Span(rank, stage, kind, i, begin, now))
            position[rank] += 1
            if kind != "W":
                made = (stage, "F" if kind == "F" else "I", i)
                there[made] = now + away[stage + 1 if kind == "F" else stage]
                if made in waiting:
                    ready.append(waiting.pop(made))
        free[rank] = now
    if waiting:
        stuck = [orders[rank][position[rank]] for rank in sorted(waiting.values())]
        raise ValueError(f"these actions wait for each other: {stuck}")
    return spans


def depends_on(stage: int, kind: str, i: int, last: int) -> tuple[int, str, int] | None:
    """(stage, F or I, micro-batch) that must be over before an action can begin; what that one needed is over too."""
    if kind == "F":
        return (stage - 1, "F", i) if stage else None
    if kind == "W":
        return (stage, "I", i)
    return (stage + 1, "I", i) if stage < last else (stage, "F", i)


def total(spans: Sequence[Span]) -> float:
    """Seconds from the first piece of work to the end of the last."""
    return max(span.end for span in spans) - min(span.begin for span in spans)


def idle_shares(spans: Sequence[Span]) -> list[float]:
    """Of each rank: the share of the step, from the first piece of work to the end of the last, that it does none."""
    whole = total(spans)
    busy = [0.0] * (1 + max(span.rank for span in spans))
    for span in spans:
        busy[span.rank] += span.end - span.begin
    return [1 - work / whole for work in busy]
