"""What every rank of a pipeline does, in order: seven schedules, written down from their papers.

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
from collections.abc import Iterable
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
    forward = [(stages[turn], i) for turn, i in rounds(virtual, micro_batches, size)]
    backward = [(stages[-1 - turn], i) for turn, i in rounds(virtual, micro_batches, size)]
    if schedule == "looped-bfs":
        backward = [(stage, micro_batches - 1 - i) for stage, i in backward]

    split = schedule == "interleaved-zero-bubble"
    order = [Action(stage, "F", i) for stage, i in forward[:ahead]]
    for done, (stage, i) in enumerate(backward):
        if ahead + done < passes:
            order.append(Action(forward[ahead + done][0], "F", forward[ahead + done][1]))
        order.append(Action(stage, "I" if split else "B", i))
        if split and done >= rank:
            order.append(Action(backward[done - rank][0], "W", backward[done - rank][1]))
    if split:
        order += [Action(stage, "W", i) for stage, i in backward[max(0, passes - rank) :]]
    return order


def rounds(virtual: int, micro_batches: int, size: int) -> list[tuple[int, int]]:
    """(turn, micro-batch): `size` micro-batches pass all stages of a rank, one stage after another; then the next."""
    return [
        (turn, i)
        for first in range(0, micro_batches, size)
        for turn in range(virtual)
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
