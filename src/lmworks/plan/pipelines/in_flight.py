"""What a pipeline rank holds while it works: micro-batches in flight by stage, from its order of work.

Of all states of a step those are kept that can be the highest, whatever each stage keeps of a micro-batch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec.layout import IN_ROUNDS
from .schedule import order_of_rank, stages_of

ALL_FORWARD_FIRST = ("gpipe", "looped-bfs")  # schedules that run a stage's backward passes after all its forward passes

# A pass, "F" or "B", and whether the rank has run backward before it, and so has gradients.
PassKind = tuple[str, bool]


@functools.lru_cache(maxsize=2**14)
def pass_states(
    schedule: str, ranks: int, virtual: int, micro_batches: int, rank: int, whole: bool
) -> dict[PassKind, NDArray[Any]]:
    """Distinct states of a pipeline rank in each kind of pass, those that can be the highest: (states, 3 × stages).

    Columns by stage: micro-batches in flight, whose activations are kept (without one that runs backward); pending,
    with gradients of inputs and not of weights; and 1 for the stage at work. `whole`: backward passes are not split,
    as under recompute. Without a pipeline every micro-batch is like the others, and gradients of earlier ones are
    there from the start.
    """
    if ranks == 1:
        return {("F", False): np.array([[1.0, 0.0, 1.0]]), ("B", False): np.array([[0.0, 0.0, 1.0]])}
    place = {stage: slot for slot, stage in enumerate(stages_of(schedule, ranks, virtual, rank))}
    in_flight, pending, before = [0] * virtual, [0] * virtual, ("", -1, False)
    seen: dict[PassKind, dict[tuple[int, ...], None]] = {}
    begun = False
    followed = repeating(schedule, ranks, micro_batches)
    for stage, kind, _ in order_of_rank(schedule, rank, ranks, virtual, followed):
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
    # All forward passes of a stage come first: in flight are none of its micro-batches, or all but the last few.
    left_out = micro_batches - followed if schedule in ALL_FORWARD_FIRST else 0
    tables = {}
    for moment, states in seen.items():
        highest = undominated(np.array(list(states), dtype=float))
        in_flight_by_stage = highest[:, :virtual] + left_out * (highest[:, :virtual] > 0)
        at_work = np.eye(virtual)[highest[:, -1].astype(int)]
        tables[moment] = np.hstack([in_flight_by_stage, highest[:, virtual:-1], at_work])
    return tables


def undominated(states: NDArray[Any]) -> NDArray[Any]:
    """Without states than which another, with the same stage at work (the last column), holds more of everything."""
    least = (states[None, :, :-1] >= states[:, None, :-1]).all(-1) & (states[None, :, -1] == states[:, None, -1])
    np.fill_diagonal(least, False)  # states are distinct
    return states[~least.any(axis=1)]


def repeating(schedule: str, ranks: int, micro_batches: int) -> int:
    """Micro-batches after which a rank's states repeat, or all of them."""
    if schedule in ALL_FORWARD_FIRST:
        return min(micro_batches, 3)
    if schedule not in IN_ROUNDS:
        return min(micro_batches, 4 * ranks)
    rounds = max(1, micro_batches // ranks)
    size = micro_batches // rounds  # of a round; other code bases may have a last one that is not full
    return 4 * ranks if rounds > 4 and size == ranks else size * rounds
