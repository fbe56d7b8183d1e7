"""What a pipeline schedule does when: measured in a real step, or worked out from its list of actions.

A rank is idle while it waits for a neighbour. With p ranks, v stages on each, m micro-batches and equal stages, the
idle share of a step is `ideal_idle`; `simulate` follows the schedule action by action and needs no ranks, and
`Recorder` notes what really happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import schedules

from ..spec.layout import LOOPED, V_SHAPED

TORCH_NAMES = {
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@dataclass(frozen=True)
class Span:
    """One piece of work: a stage's forward or backward pass of one micro-batch."""

    rank: int
    stage: int
    kind: str  # F, B, I or W: forward, backward, backward for inputs or for weights
    micro_batch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Action:
    stage: int
    kind: str
    micro_batch: int


class Recorder:
    """Notes when this rank works. On a GPU each note waits for the device: honest spans, at the cost of overlap."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.spans: list[Span] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # not the faster monotonic clock: ranks of a step are compared with each other

    @contextmanager
    def note(self, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        begin = self.now()
        yield
        self.spans.append(Span(self.rank, stage, kind, micro_batch, begin, self.now()))

    def gather(self, group: ProcessGroup) -> list[Span]:
        """Every rank's spans of the step, on every rank; time counts from the first of them."""
        lists: list[list[Span]] = [[] for _ in range(group.size())]
        dist.all_gather_object(lists, self.spans, group=group)
        spans = [span for spans in lists for span in spans]
        start = min(span.begin for span in spans)
        return [replace(span, begin=span.begin - start, end=span.end - start) for span in spans]


# --- from a list of actions -------------------------------------------------------------------------------


def actions_of(schedule: str, ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does, in order. Looped and V-shaped orders come from PyTorch's own schedules."""
    if schedule == "gpipe":
        return [[Action(r, kind, i) for kind in "FB" for i in range(micro_batches)] for r in range(ranks)]
    if schedule == "1f1b":
        return [one_forward_one_backward(r, min(ranks - r, micro_batches), micro_batches) for r in range(ranks)]
    stages = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=ranks * virtual, submod=nn.Identity())
        for _ in range(virtual)
    ]
    kind: Any = schedules.get_schedule_class(TORCH_NAMES[schedule])
    order = kind(stages, micro_batches).pipeline_order
    return [[action for entry in order[rank] if entry for action in flat(entry)] for rank in range(ranks)]


def one_forward_one_backward(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    """`ahead` forward passes, then a backward and a forward pass in turn, then the backward passes that are left."""
    order = [Action(stage, "F", i) for i in range(ahead)]
    for i in range(micro_batches):
        order.append(Action(stage, "B", i))
        if i + ahead < micro_batches:
            order.append(Action(stage, "F", i + ahead))
    return order


def flat(entry: Any) -> list[Action]:
    """DualPipeV pairs a forward with a backward pass that could overlap; PyTorch runs one after the other."""
    if entry.sub_actions:
        return [action for part in entry.sub_actions for action in flat(part)]
    return [Action(entry.stage_index, entry.computation_type.value, entry.microbatch_index)]


def durations(recompute: str = "none") -> dict[str, float]:
    """Of each kind of work in forward passes of one stage: F = I = W, and a whole backward pass B is both its halves.

    With recompute the backward pass is never split (all of it is in I), and `full` runs the stage forward once more.
    """
    if recompute == "none":
        return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    whole = 3.0 if recompute == "full" else 2.0
    return {"F": 1.0, "B": whole, "I": whole, "W": 0.0}


def simulate(
    orders: list[list[Action]], times: Mapping[str, float], costs: Sequence[float] | None = None
) -> list[Span]:
    """Every rank takes its actions in order, each as soon as what it needs is there; messages take no time.

    `costs` are factors of the stages (all 1 by default).
    """
    last = max(action.stage for order in orders for action in order)
    done: dict[tuple[int, str, int], float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    spans: list[Span] = []
    waiting = set(range(len(orders)))
    while waiting:
        before = len(spans)
        for rank in sorted(waiting):
            while position[rank] < len(orders[rank]):
                action = orders[rank][position[rank]]
                needed = needs(action, last)
                if not all(need in done for need in needed):
                    break
                begin = max([free[rank], *(done[need] for need in needed)])
                factor = costs[action.stage] if costs is not None else 1.0
                free[rank] = begin + length(action, times) * factor
                for kind in ("I", "W") if action.kind == "B" else (action.kind,):
                    done[action.stage, kind, action.micro_batch] = free[rank]
                spans.append(Span(rank, action.stage, action.kind, action.micro_batch, begin, free[rank]))
                position[rank] += 1
            else:
                waiting.discard(rank)
        if waiting and len(spans) == before:
            stuck = [orders[rank][position[rank]] for rank in sorted(waiting)]
            raise ValueError(f"these actions wait for each other: {stuck}")
    return spans


def needs(action: Action, last: int) -> list[tuple[int, str, int]]:
    """(stage, kind, micro-batch) that must be over before an action can begin."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if action.kind == "W":
        return [(stage, "I", i)]
    return [(stage, "F", i), *([(stage + 1, "I", i)] if stage < last else [])]


def length(action: Action, times: Mapping[str, float]) -> float:
    """The first stage has no inputs that want a gradient: PyTorch runs its whole backward pass in W, nothing in I."""
    if action.stage == 0 and action.kind in ("I", "W") and times["W"]:
        return times["B"] if action.kind == "W" else 0.0
    return times[action.kind]


# --- idle time --------------------------------------------------------------------------------------------


def idle_shares(spans: list[Span]) -> list[float]:
    """Of each rank: the share of the step, from the first piece of work to the end of the last, that it does none."""
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = [0.0] * (1 + max(span.rank for span in spans))
    for span in spans:
        busy[span.rank] += span.end - span.begin
    return [1 - work / whole for work in busy]


def ideal_idle(
    schedule: str, ranks: int, virtual: int, micro_batches: int, times: Mapping[str, float] | None = None
) -> tuple[float, str]:
    """(idle share, its formula) with equal stages and messages that take no time; F, B, I, W are a stage's times.

    A rank idles (p − 1) times a forward and a whole backward pass. Zero-bubble schedules (arXiv 2401.10241) put the
    backward pass for weights into those gaps; in a V only the first wave is left, which the papers do not count,
    as their next step begins before the last has ended everywhere.
    """
    times = times or durations()
    if schedule == "interleaved-zero-bubble":
        gap, text = times["F"] + max(0.0, times["I"] - times["W"]), "g/(v·m(F+B)+g), g = (p−1)(F+max(0, I−W))"
    elif schedule in V_SHAPED:
        gap, text = times["F"], "g/(v·m(F+B)+g), g = (p−1)F, where F = I = W"
    else:
        gap, text = times["F"] + times["B"], "(p−1)/(v·m+p−1)" if schedule in LOOPED else "(p−1)/(m+p−1)"
    idle = (ranks - 1) * gap
    return idle / (virtual * micro_batches * (times["F"] + times["B"]) + idle), text
