"""Pipeline schedules: what every rank does, in order (seven schedules, from their papers), and when, simulated.

`bubble.py` has the time in closed form.

A rank r of p holds stages r, r + p, r + 2p, … in a loop, or stages r and 2p − 1 − r in a V. Every stage runs each of m
micro-batches forward (F) and backward: whole (B), or in two halves of which only the first is waited for by others,
I for the gradient of the stage's inputs and W for that of its weights.

    gpipe                    all forward passes, then all backward passes                        arXiv 1811.06965
    1f1b                     p − r forward passes ahead, then backward and forward in turn       arXiv 2006.09503
    looped-bfs               gpipe, stage by stage                                               arXiv 2211.05953
    interleaved              1f1b in rounds of about p micro-batches a stage                     arXiv 2104.04473
    interleaved-zero-bubble  the same, with every W put off by r backward passes                 arXiv 2401.10241
    zbv                      a V; forward, I and W in turn, each W that fits no gap at the end   arXiv 2401.10241
    dualpipev                a V; a forward pass beside a backward pass of the other stage       arXiv 2412.19437

The orders are those that `torch.distributed.pipelining` runs, and a test holds them against it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from ...spec import SpecError
from ...spec.errors import did_you_mean
from ...spec.layout import V_SHAPED
from ...spec.run import SCHEDULES


class Action(NamedTuple):
    """One piece of work of a rank; a plain tuple, as a step has tens of thousands."""

    stage: int
    kind: str  # F, B, I or W
    micro_batch: int


def actions(schedule: str, ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """Of every rank, what it does in order. Which sizes a schedule can run is a matter of spec/layout.py."""
    if schedule not in SCHEDULES:
        raise SpecError(f"parallel.schedule = '{schedule}' is not known{did_you_mean(schedule, SCHEDULES)}")
    if min(ranks, virtual, micro_batches) < 1:
        raise SpecError(
            f"a pipeline of {ranks} ranks × {virtual} stages and {micro_batches} micro-batches: each must be 1 or more"
        )
    return [order_of_rank(schedule, rank, ranks, virtual, micro_batches) for rank in range(ranks)]


def order_of_rank(schedule: str, rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    if schedule == "zbv":
        return zbv(rank, ranks, micro_batches)
    if schedule == "dualpipev":
        return dualpipev(rank, ranks, micro_batches)
    return looped_order(schedule, rank, ranks, virtual, micro_batches)


def stages_of(schedule: str, ranks: int, virtual: int, rank: int) -> list[int]:
    """Stages that a rank holds, in the order in which a micro-batch passes them."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * virtual, ranks))


# --- several stages a rank, in a loop -----------------------------------------------------------------------


def looped_order(schedule: str, rank: int, ranks: int, virtual: int, micro_batches: int) -> list[Action]:
    """Some forward passes ahead, then a forward and a backward pass in turn, then the backward passes that are left."""
    stages, passes = stages_of(schedule, ranks, virtual, rank), virtual * micro_batches
    if schedule in ("gpipe", "looped-bfs"):
        size, ahead = micro_batches, passes
    elif schedule == "1f1b":
        size, ahead = micro_batches, min(ranks - 1 - rank, passes)
    else:
        size = micro_batches // max(1, micro_batches // ranks)
        hops = (1 if schedule == "interleaved-zero-bubble" else 2) * (ranks - 1 - rank)
        ahead = min((virtual - 1) * size + hops, passes)
    split = schedule == "interleaved-zero-bubble"
    forward = rounds("F", stages, micro_batches, size)
    backward = rounds("I" if split else "B", stages[::-1], micro_batches, size)
    if schedule == "looped-bfs":
        backward = [Action(stage, kind, micro_batches - 1 - i) for stage, kind, i in backward]

    order = forward[:ahead]
    for done, action in enumerate(backward):
        if ahead + done < passes:
            order.append(forward[ahead + done])
        order.append(action)
        if split and done >= rank:
            order.append(backward[done - rank]._replace(kind="W"))
    if split:
        order += [action._replace(kind="W") for action in backward[max(0, passes - rank) :]]
    return order


def rounds(kind: str, stages: list[int], micro_batches: int, size: int) -> list[Action]:
    """`size` micro-batches pass all stages of a rank, one stage after another; then the next micro-batches."""
    return [
        Action(stage, kind, i)
        for first in range(0, micro_batches, size)
        for stage in stages
        for i in range(first, first + size)
    ]


# --- two stages a rank, in a V ------------------------------------------------------------------------------
# A word names work and stage: "F0" is the next forward pass of the stage on the way down, "I1" the next gradient of
# inputs of the stage on the way up.


def zbv(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """The order is made for 2p − 1 micro-batches or more; with fewer, those that are not there are left out."""
    down, count = ranks - rank, max(2 * ranks - 1, micro_batches)
    left = count - (2 * ranks - 1 - rank)  # forward passes of stage 0 after the warm-up
    words = chain(
        repeat("F0", 2 * down - 1),
        ["F1", "F0"] * rank,
        ["F1", "I1", "W1"] * down,
        ["F0", "I0", "W0", "F1", "I1", "W1"] * left,
        ["I0", "W0", "F1", "I1", "W1"] * (count - ranks - left),
        ["I0", "I1"] * rank,
        ["I0", "W0"] * down,
        repeat("W1", rank),
        repeat("W0", rank),
    )
    return [action for action in numbered(words, rank, ranks) if action.micro_batch < micro_batches]


def dualpipev(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ "W" takes the oldest half that waits, if one does. In the last ranks' cool-down the second half is split."""
    down, up = ranks - 1 - rank, rank + 1
    last = ["B1", "B0"] * up  # the backward passes that no forward pass goes with
    last = [*last[:up], *(word.replace("B", "I") for word in last[up:])]
    words = chain(
        repeat("F0", 2 * down),
        ["F0", "F1"] * up,
        ["I1", "W", "F1"] * down,
        ["F0", "B1", "F1", "B0"] * (micro_batches - 2 * ranks + up),
        ["B1", "F1", "B0"] * down,
        last,
        ["W", "I0"] * down,
        repeat("W", up),
    )
    return numbered(words, rank, ranks)


def numbered(words: Iterable[str], rank: int, ranks: int) -> list[Action]:
    """Every kind of work takes the micro-batches in turn; I and B are one kind."""
    stages, order = (rank, 2 * ranks - 1 - rank), list[Action]()
    following: dict[tuple[str, int], int] = {}
    waiting: deque[tuple[int, int]] = deque()
    for word in words:
        kind = word[0]
        if word == "W":
            if waiting:
                stage, i = waiting.popleft()
                order.append(Action(stage, kind, i))
            continue
        turn = int(word[1])
        key = ("B" if kind == "I" else kind, turn)
        i = following.get(key, 0)
        following[key] = i + 1
        order.append(Action(stages[turn], kind, i))
        if kind == "I":
            waiting.append((stages[turn], i))
    return order


# --- schedule --------------------------------------------------------------------------------------------


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
    last = len(stages) - 1
    there: dict[tuple[int, str, int], float] = {}  # (stage, F or I, micro-batch) → when the next stage has it
    waiting: dict[tuple[int, str, int], int] = {}  # what a rank waits for → that rank
    position, free = [0] * len(orders), [0.0] * len(orders)
    spans: list[Span] = []
    ready = [*range(len(orders))]
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
                made, receiver = ((stage, "F", i), stage + 1) if kind == "F" else ((stage, "I", i), stage - 1)
                there[made] = now + (send if rank_of.get(receiver, rank) != rank else 0.0)
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
