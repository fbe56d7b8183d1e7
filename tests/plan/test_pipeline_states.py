"""States of a pipeline rank (`plan/pipelines/in_flight.py`) against its order of work, followed action by action."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.plan.memory.rank_weights import distinct_rows
from lmworks.plan.pipelines.in_flight import PassKind, pass_states
from lmworks.plan.pipelines.schedule import order_of_rank, stages_of

SHAPES = [
    ("gpipe", 4, 1, 9),
    ("gpipe", 2, 1, 2),
    ("looped-bfs", 2, 3, 7),
    ("1f1b", 4, 1, 40),
    ("interleaved", 2, 2, 12),
    ("interleaved", 4, 3, 32),
    ("interleaved-zero-bubble", 2, 2, 12),
    ("zbv", 3, 2, 20),
    ("dualpipev", 2, 2, 20),
]


def highest(schedule: str, ranks: int, virtual: int, count: int, rank: int, sizes: np.ndarray) -> dict[PassKind, float]:
    """The most bytes in each kind of pass: `sizes` of each stage in flight, pending, at work forward and backward."""
    kept, waiting, forward, backward = sizes
    slots = {stage: slot for slot, stage in enumerate(stages_of(schedule, ranks, virtual, rank))}
    in_flight, pending, begun = np.zeros(virtual), np.zeros(virtual), False
    most: dict[PassKind, float] = {}
    for stage, kind, _ in order_of_rank(schedule, rank, ranks, virtual, count):
        slot = slots[stage]
        if kind != "W":
            in_flight[slot] += 1 if kind == "F" else -1
            work = (forward if kind == "F" else backward)[slot]
            size = in_flight @ kept + pending @ waiting + work
            moment = ("F" if kind == "F" else "B", begun)
            most[moment] = max(most.get(moment, 0.0), size)
        if kind == "I":  # activations stay until the gradients of weights are made
            in_flight[slot] += 1
            pending[slot] += 1
        elif kind == "W":
            in_flight[slot] -= 1
            pending[slot] -= 1
        begun = begun or kind != "F"
    return most


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "count"), SHAPES)
def test_the_highest_state_of_each_pass_is_among_them(schedule: str, ranks: int, virtual: int, count: int) -> None:
    random = np.random.default_rng(0)
    for rank in range(ranks):
        states = pass_states(schedule, ranks, virtual, count, rank, whole=False)
        for _ in range(20):
            sizes = random.integers(1, 1000, (4, virtual)).astype(float)
            found = {
                moment: (table @ np.concatenate([*sizes[:2], sizes[2 if moment[0] == "F" else 3]])).max()
                for moment, table in states.items()
            }
            assert found == highest(schedule, ranks, virtual, count, rank, sizes)


def test_distinct_rows_of_columns_with_large_numbers() -> None:
    """As a search on thousands of nodes has them: (max + 1) of all columns multiplied is above 2⁶³."""
    random = np.random.default_rng(1)
    columns = [random.choice([1, 2, most], 500) for most in (8, 128, 32, 1, 8, 2**19, 2**20, 31)]
    rows, where = distinct_rows(columns)
    assert len(rows) == len(set(map(tuple, rows)))
    assert [rows[number] for number in where] == np.stack(columns, axis=-1).tolist()
