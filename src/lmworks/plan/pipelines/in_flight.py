"""What a pipeline rank holds while it works: micro-batches in flight by stage, from its order of work.

Of all states of a step those are kept that can be the highest, whatever each stage keeps of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec.layout import IN_ROUNDS
from .orders import order_of_rank, stages_of

# A pass, "F" or "B", and whether the rank has run backward before it, and so has gradients.
Moment = tuple[str, bool]


@dataclass(frozen=True)
class PassStates:
    """Distinct states of a rank in one kind of pass: micro-batches by stage (states, stages), and the stage at work."""

    in_flight: NDArray[Any]  # whose activations are kept, without one that runs backward
    pending: NDArray[Any]  # with gradients of inputs and not of weights
    at_work: NDArray[Any]


@functools.lru_cache(maxsize=2**14)
def pass_states(
    schedule: str, ranks: int, virtual: int, micro_batches: int, rank: int, whole: bool
) -> dict[Moment, PassStates]:
    """Of a pipeline rank, those that can be the highest. `whole`: backward passes are not split, as under recompute.

    Without a pipeline every micro-batch is like the others, and gradients of earlier ones are there from the start.
    """
    if ranks == 1:
        one, none, at = np.ones((1, 1)), np.zeros((1, 1)), np.zeros(1, dtype=int)
        return {("F", False): PassStates(one, none, at), ("B", False): PassStates(none, none, at)}
    place = {stage: slot for slot, stage in enumerate(stages_of(schedule, ranks, virtual, rank))}
    in_flight, pending, before = [0] * virtual, [0] * virtual, ("", -1, False)
    seen: dict[Moment, dict[tuple[int, ...], None]] = {}
    begun = False
    for stage, kind, _ in order_of_rank(schedule, rank, ranks, virtual, repeating(schedule, ranks, micro_batches)):
        slot, split = place[stage], kind == "I" and not whole  # else I is all of the backward pass
        in_flight[slot] += {"F": 1, "W": 0}.get(kind, -1)
        if kind != "W":
            states = seen.setdefault(("F" if kind == "F" else "B", begun), {})
            if (kind, slot, begun) != before:
                states[*in_flight, *pending, slot] = None
            elif kind == "F":  # of several in a row the last is the highest, of backward passes the first
                states.popitem()
                states[*in_flight, *pending, slot] = None
            elif split:
                states[*in_flight, *pending, slot] = None
        before = (kind, slot, begun)
        if split:  # activations stay until W
            in_flight[slot] += 1
            pending[slot] += 1
        elif kind == "W" and not whole:
            in_flight[slot] -= 1
            pending[slot] -= pending[slot] > 0
        begun = begun or kind != "F"
    tables = {moment: undominated(np.array(list(states), dtype=float)) for moment, states in seen.items()}
    return {
        moment: PassStates(table[:, :virtual], table[:, virtual:-1], table[:, -1].astype(int))
        for moment, table in tables.items()
    }


def undominated(states: NDArray[Any]) -> NDArray[Any]:
    """Without states than which another, with the same stage at work (the last column), holds more of everything."""
    least = (states[None, :, :-1] >= states[:, None, :-1]).all(-1) & (states[None, :, -1] == states[:, None, -1])
    np.fill_diagonal(least, False)  # states are distinct
    return states[~least.any(axis=1)]


def repeating(schedule: str, ranks: int, micro_batches: int) -> int:
    """Micro-batches after which a rank's states repeat, or all of them."""
    if schedule in ("gpipe", "looped-bfs"):
        return micro_batches
    if schedule not in IN_ROUNDS:
        return min(micro_batches, 4 * ranks)
    rounds = max(1, micro_batches // ranks)
    size = micro_batches // rounds  # of a round; other code bases may have a last one that is not full
    return 4 * ranks if rounds > 4 and size == ranks else size * rounds


def padded(states: Sequence[PassStates | None], slots: int) -> NDArray[Any]:
    """(pipelines, states, 3 × slots): in flight, pending, and 1 for the stage at work; 0 where there are fewer."""
    most = max(len(one.at_work) for one in states if one)
    table = np.zeros((len(states), most, 3 * slots))
    for number, one in enumerate(states):
        if one is None:
            continue
        count, stages = one.in_flight.shape
        table[number, :count, :stages] = one.in_flight
        table[number, :count, slots : slots + stages] = one.pending
        table[number, np.arange(count), 2 * slots + one.at_work] = 1
    return table
