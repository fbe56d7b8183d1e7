"""Sets of intervals against sets of integers."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.trace.intervals import Spans


def drawn(rng: np.random.Generator, count: int) -> tuple[Spans, set[int]]:
    start = rng.integers(0, 60, count)
    end = start + rng.integers(0, 9, count)
    return Spans.union(start, end), {moment for a, b in zip(start, end, strict=True) for moment in range(a, b)}


def moments(spans: Spans) -> set[int]:
    assert (spans.end > spans.start).all() and (spans.start[1:] > spans.end[:-1]).all()
    return {moment for a, b in zip(spans.start, spans.end, strict=True) for moment in range(a, b)}


@pytest.mark.parametrize("seed", range(30))
def test_spans_are_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (a, in_a), (b, in_b) = drawn(rng, int(rng.integers(0, 12))), drawn(rng, int(rng.integers(0, 12)))
    assert moments(a) == in_a and a.total == len(in_a)
    assert moments(a | b) == in_a | in_b
    assert moments(a & b) == in_a & in_b
    assert moments(a - b) == in_a - in_b
    window = set(range(10, 40))
    assert moments(a.within(10, 40)) == in_a & window
    assert moments(a.gaps(10, 40)) == window - in_a
    low = rng.integers(0, 60, 5)
    high = low + rng.integers(0, 20, 5)
    expected = [len(in_a & set(range(x, y))) for x, y in zip(low, high, strict=True)]
    assert a.covered(low, high).tolist() == expected
