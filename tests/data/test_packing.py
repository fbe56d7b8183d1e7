"""Best-fit-decreasing against a plain version of it, the lower bound, and first-fit."""

from __future__ import annotations

import random
import time

import pytest

from lmworks.data.packing import pack


def plain_best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Written from the definition: quadratic."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            rows.append([])
            rooms.append(size)
        row = min(fitting)[1] if fitting else len(rows) - 1
        rows[row].append(index)
        rooms[row] -= lengths[index]
    return rows


def first_fit(lengths: list[int], size: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        row = next((row for row, room in enumerate(rooms) if room >= length), None)
        if row is None:
            rooms.append(size - length)
        else:
            rooms[row] -= length
    return len(rooms)


@pytest.mark.parametrize("seed", range(50))
def test_rows_fill_as_plain_best_fit_does(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([1, 7, 32, 100])
    lengths = [draw.randint(1, size) for _ in range(draw.randint(0, 80))]
    rows, expected = pack(lengths, size), plain_best_fit(lengths, size)
    filled = [sorted(sum(lengths[i] for i in row) for row in made) for made in (rows, expected)]
    assert filled[0] == filled[1] and max(filled[0], default=0) <= size
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert rows == pack(lengths, size)


def test_conversations_fill_rows() -> None:
    """Lengths of chat data: log-normal, median 245 tokens, some as long as a row."""
    draw = random.Random(0)
    lengths = [max(8, min(2048, int(draw.lognormvariate(5.5, 0.9)))) for _ in range(20_000)]
    began = time.perf_counter()
    rows = pack(lengths, 2048)
    assert time.perf_counter() - began < 10
    least = -(-sum(lengths) // 2048)
    assert least <= len(rows) <= 1.02 * least
    some = lengths[:2000]
    assert len(pack(some, 2048)) < first_fit(some, 2048)
