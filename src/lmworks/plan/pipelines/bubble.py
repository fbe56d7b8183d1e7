"""How long a pipeline's step takes, and what its ranks hold, in closed form: for many pipelines at once.

With p ranks, v stages on each, m micro-batches and equal stages, F, I and W the seconds of a stage's forward pass and
of the two halves of its backward pass, B = I + W, the busiest rank works v·m·(F + B) and waits

    gpipe, 1f1b, looped-bfs, interleaved   (p − 1)(F + B)
    interleaved-zero-bubble                (p − 1)(F + max(0, I − W))
    zbv, dualpipev                         (p − 1)F where F = I = W: the first wave, which the papers do not count, as
                                           their next step begins before the last has ended everywhere

and more where micro-batches are few, messages slow or stages unequal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np

from ...spec.layout import IN_ROUNDS, LOOPED, V_SHAPED
from ..case import Number

# A rank between the ends that is busier than the others waits less. Half of them lie before it, for whom it waits as
# ever; of the way to the other half and back, its own forward passes fill about half.
MIDWAY = 0.75


class PipelineTime(NamedTuple):
    """A pipeline's step in seconds: the work of its busiest rank, and what that rank waits."""

    work: Number
    idle: Number

    @property
    def total(self) -> Number:
        return self.work + self.idle


def bubble(
    schedule: str,
    ranks: Number,
    virtual: Number,
    micro_batches: Number,
    forward: Number,
    backward_input: Number,
    backward_weight: Number,
    costs: Costs | None = None,
    send: Number = 0.0,
) -> PipelineTime:
    """What `simulate` finds, in closed form; every number may be an array.

    The times are those of one micro-batch in a stage, the mean of those that are neither first nor last; `costs` are
    what differs from it. The step lasts as long as its longest chain of actions that wait for each other, and the
    formulas are the few chains that can be longest: through the busiest rank, with the way there and back. They were
    read off the simulation; a test bounds the difference.
    """
    p, v, m, costs = ranks, virtual, micro_batches, costs or Costs()
    pipeline = UniformPipeline(p, v, m, forward, backward_input, backward_weight, send)
    lengths = {"1f1b": one_f_one_b, "interleaved": interleaved, "interleaved-zero-bubble": zero_bubble}
    if schedule in V_SHAPED:
        busiest = np.maximum(2 * costs.middle, costs.first + costs.last)
        seconds = v_shaped(schedule, pipeline, costs)
    else:
        busiest = costs.busiest(p, v)
        seconds = lengths.get(schedule, breadth_first)(pipeline, costs)
    work = m * busiest * pipeline.whole
    return PipelineTime(work, np.maximum(0.0, np.where(p == 1, 0.0, seconds - work)))


def ideal_idle(
    schedule: str, ranks: int, virtual: int, micro_batches: int, times: Mapping[str, float]
) -> tuple[float, str]:
    """(idle share, its formula) with equal stages and messages that take no time; `times` of F, B, I and W."""
    step = bubble(schedule, ranks, virtual, micro_batches, times["F"], times["I"], times["W"])
    if schedule == "interleaved-zero-bubble":
        text = "g/(v·m(F+B)+g), g = (p−1)(F+max(0, I−W))"
    elif schedule in V_SHAPED:
        text = "g/(v·m(F+B)+g), g = (p−1)F, where F = I = W"
    else:
        text = "(p−1)/(v·m+p−1)" if schedule in LOOPED else "(p−1)/(m+p−1)"
    equal = times["F"] == times["I"] == times["W"]
    if (schedule in V_SHAPED and not equal) or (virtual > 1 and micro_batches < ranks):
        text = "the longest chain of work that waits for work"
    return float(step.idle / step.total), text


class Costs(NamedTuple):
    """How many times as much as the mean of the others: the first stage, the last, and the busiest rank between.

    The first stage holds the embedding and the last the head; layers that do not divide make some ranks busier.
    """

    first: Number = 1.0
    last: Number = 1.0
    middle: Number = 1.0
    late: Number = 1.0  # W of the last stage: a head has none that can wait

    def busiest(self, p: Number, v: Number) -> Number:
        """Of ranks whose stages lie in a loop, in stages; two ranks have none between them."""
        return maximum(np.where(p == 2, 0.0, v * self.middle), v - 1 + self.first, v - 1 + self.last)


class UniformPipeline(NamedTuple):
    """A pipeline of equal stages: p ranks of v stages, m micro-batches, seconds of F, I, W and of a message."""

    p: Number
    v: Number
    m: Number
    f: Number
    i: Number
    w: Number
    send: Number

    @property
    def b(self) -> Number:
        return self.i + self.w

    @property
    def whole(self) -> Number:
        return self.f + self.i + self.w

    def chain(self, f: Number, i: Number, w: Number, sends: Number) -> Number:
        """Seconds of so many pieces of work and messages: what a chain has beyond the v·m of each kind of a rank."""
        return f * self.f + i * self.i + w * self.w + sends * self.send

    def way(self, size: Number) -> Number:
        """There and back: p − 1 stages, and between two turns what a round of `size` micro-batches does not hide."""
        p, hops = self.p, (self.p - 1) * (self.whole + 2 * self.send)
        turns = excess(0, (p - size) * self.f + p * self.send) + excess(0, (p - size) * self.b + p * self.send)
        return hops + (self.v - 1) * turns


def excess(floor: Number, number: Number) -> Number:
    return np.maximum(floor, number)


def maximum(*lengths: Number) -> Number:
    return reduce(np.maximum, lengths)


def breadth_first(even: UniformPipeline, costs: Costs) -> Number:
    """gpipe and looped-bfs: every turn moves at the pace of its own slowest stage, so two slow ends cost twice."""
    first, last = costs.first, costs.last
    alone, v = even.v == 1, even.v
    pace = maximum(costs.busiest(even.p, v), np.where(alone, 0, v - 2 + first + last))
    way = np.where(alone, excess(0, np.minimum(first, last) - 1), 0) - excess(0, 1 - first) - excess(0, 1 - last)
    return (even.m * pace + way) * even.whole + even.way(even.m)


def one_f_one_b(even: UniformPipeline, costs: Costs) -> Number:
    """1f1b, paced by its last rank, one in the middle, or the first.

    A rank with n others below it waits for its first backward pass, but for n forward passes of its own, and as long
    again at the end. No more than p micro-batches are under way, so their messages hold up each of their rounds.
    """
    p, m, whole = even.p, even.m, even.whole
    first, last, middle, _ = costs

    def below(n: Number, cost: Number, others: Number) -> Number:
        return excess(0, others * whole - n * cost * even.f) + excess(0, others * whole - n * cost * even.b)

    rounds = 2 * (m - 2 - np.floor((m - 2) / p)) * even.send
    level = (m + first) * whole + below(p - 2, 1.0, p - 3 + last) + rounds
    busy = (m * middle + first + p - 3) * whole + below(1, middle, last)
    top = m * first * whole + below(p - 1, first, p - 2 + last)
    bottom = (m * last + first + p - 2) * whole
    ends = maximum(top, bottom)
    return maximum(np.where(p > 2, maximum(level, busy), ends + rounds), ends) + 2 * (p - 1) * even.send


def interleaved(even: UniformPipeline, costs: Costs) -> Number:
    """As 1f1b. A slow first stage holds up the others for one round of micro-batches; paced by it, others keep up."""
    p, v, m, whole = even.p, even.v, even.m, even.whole
    first, last, middle, _ = costs
    way = even.way(m // np.maximum(1, m // p)) + (p * excess(0, first - 1) - excess(0, 1 - first)) * whole
    return maximum(
        np.where(p == 2, 0, (v * m - 3 * excess(0, 1 - last)) * whole + way),
        np.where(p == 2, 0, v * m * middle * whole + MIDWAY * way),
        (v - 1 + last) * m * whole + way,
        (v - 1 + first) * m * whole + (p - 1) * excess(0, even.b - first * even.f),
    )


def zero_bubble(even: UniformPipeline, costs: Costs) -> Number:
    """interleaved-zero-bubble: W fills what I leaves, until the messages of a round fill it."""
    p, v, m = even.p, even.v, even.m
    few, d = excess(0, p - m), p - 1  # few: micro-batches that lack to fill the ranks
    filled = np.minimum(m, p) - 1
    turns, rounds = (v - 1) * p, np.clip(v * m * d / p + v - 2, filled, v * m - 1)
    gap = maximum(
        even.chain(d + (v - 1) * few, d, -filled, 4 * d + turns),
        even.chain(d + (v - 1) * few, few, 0, 3 * d + turns),
        even.chain(v * few, d, 0, 2 * d + turns),
        even.chain(d + (v - 1) * few, d + (v - 1) * few, -rounds, 2 * d + 2 * rounds),
    )
    slow = excess(0, np.minimum(costs.first, costs.last) - 1) * p * (even.f + even.i)
    quick = (excess(0, 1 - costs.first) + 2 * excess(0, 1 - costs.last)) * even.f
    # The last rank's W lie p − 1 turns behind: those of its other stages go with the last stage's F and I, and while
    # it has the short ones of its last stage, it waits for the other ranks.
    behind = (v - 1 + costs.last) * even.whole + (1 - 1 / p) * excess(0, 1 - costs.late) * even.w
    return m * maximum(even.whole * costs.busiest(p, v), behind) + gap + slow - quick


def v_shaped(schedule: str, even: UniformPipeline, costs: Costs) -> Number:
    """zbv and dualpipev: both ends are on rank 0, whose own W fills its gaps where it sets the pace."""
    p, m, d = even.p, even.m, even.p - 1
    if schedule == "zbv":
        few, extra = excess(0, 2 * p - 1 - m), np.clip(m - p, 0, d)  # micro-batches that lack to fill the V; beyond p
        gap = maximum(
            even.chain(2 * excess(0, p - m), 2 * d, -2 * extra, 6 * d - 2),
            even.chain(few, few, 0, 4 * d),
            even.chain(d + extra, d - 2 * extra, -extra, 4 * d),
            even.chain(0, 2 * np.minimum(few, d), 0, 5 * d),
            np.where(few < d, even.chain(0, d + few, -few, 5 * d - 2), 0),
            np.where(few < d, even.chain(0, few + 1, d - 1 - few, 3 * d), 0),
            np.where(few < d, even.chain(few + 1, 0, d - 1 - few, 3 * d - 2), 0),
            np.where(few < d, even.chain(2 * d - 1 - few, few + 1 - d, 0, 3 * d - 2), 0),
            even.chain(2 * d, 0, -2 * d - 1, 4 * d),
        )
    else:
        gap = maximum(
            even.chain(-1, 2 * d, -d, 6 * d),
            even.chain(-1, d, 0, 5 * d),
            even.chain(d, 0, 0, 3 * d),
            even.chain(d, d, -d, 4 * d),
            even.chain(2 * d, 0, -2 * d, 4 * d),
        )
    ends = m * even.whole * (costs.first + costs.last) + top_of_v(schedule, even, costs.first, costs.last)
    return maximum(2 * m * even.whole + gap, 2 * m * costs.middle * even.whole + MIDWAY * gap, ends)


def top_of_v(schedule: str, even: UniformPipeline, first: Number, last: Number) -> Number:
    """What rank 0 of a V waits where it sets the pace, as it holds both ends: what its own W leave of the ways."""
    p, d, both = even.p, even.p - 1, even.i - even.w
    slow, quick = excess(0, first - 1) * even.b, excess(0, 1 - first) * (2 * even.f + even.b)
    there, back = d * (both - slow + quick), d * (2 * both - even.f - excess(0, last - 1) * even.whole - slow)
    if schedule != "zbv":
        return maximum(0.0, there, back)
    few = excess(0, 2 * p - 1 - even.m)  # forward passes that lack until the first micro-batch is back
    return maximum(excess(0, there) + few * even.f, back, (d - last) * even.w - p * slow + d * quick)


def in_flight(
    schedule: str, ranks: Number, virtual: Number, micro_batches: Number, rank: Number, whole: bool = False
) -> Number:
    """Activations that a rank holds at once, at most: stages × micro-batches that ran forward and not yet back.

    They are held until W where the backward pass is split; `whole`: it is not, as under recompute.
    """
    p, v, m = ranks, virtual, micro_batches
    if schedule == "zbv":
        return reduce(np.minimum, (2 * p, 2 * m, m + rank + 1))
    if schedule == "dualpipev":
        return np.minimum(2 * p + 1, 2 * m)
    if schedule == "1f1b":
        return np.minimum(p - rank, m)
    if schedule not in IN_ROUNDS:
        return v * m
    ahead = (v - 1) * (m // np.maximum(1, m // p)) + p - rank
    if schedule == "interleaved":
        return np.minimum(ahead + p - 1 - rank, v * m)
    return np.minimum(ahead if whole else ahead + rank, v * m)
