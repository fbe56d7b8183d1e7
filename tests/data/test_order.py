"""The order of samples: permutation and mixture."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.data.order import Mixture, key_of, permute, whole_counts
from lmworks.spec import SpecError


def order(n: int, seed: int = 0, stream: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, key_of(seed, stream, np.full(n, epoch)))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 4097, 65_536])
def test_permutation_is_bijective(n: int) -> None:
    for epoch in range(3):
        assert np.array_equal(np.sort(order(n, epoch=epoch)), np.arange(n))


def test_order_depends_on_seed_stream_and_epoch() -> None:
    orders = [order(1000), order(1000, seed=1), order(1000, stream=1), order(1000, epoch=1), order(1000, seed=2**62)]
    for i, a in enumerate(orders):
        for b in orders[i + 1 :]:
            assert (a == b).mean() < 0.02


def test_single_position_equals_whole_permutation() -> None:
    whole = order(4097, seed=5)
    for position in (0, 1, 2048, 4096):
        one = permute(np.array([position]), 4097, key_of(5, 0, np.array([0])))
        assert one[0] == whole[position]


def test_order_is_uncorrelated() -> None:
    """Neighbours go to unrelated places, and places are even: a weak round function shows in either."""
    n = 1 << 14
    places = order(n, seed=3).astype(float)
    assert abs(np.corrcoef(np.arange(n), places)[0, 1]) < 0.03
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.03
    halves = np.histogram(places[: n // 2], bins=16)[0]  # of a random half, 512 ± 16 fall in each sixteenth
    assert abs(halves - n / 32).max() < 5 * 16


def test_small_sizes_reach_all_permutations() -> None:
    """Of three things there are six orders; over many epochs each comes about as often."""
    seen = [tuple(order(3, epoch=epoch)) for epoch in range(1200)]
    counts = [seen.count(o) for o in set(seen)]
    assert len(counts) == 6
    assert min(counts) > 120


def test_huge_sizes_need_no_memory() -> None:
    n = 10**12
    places = permute(np.arange(1000), n, key_of(0, 0, np.zeros(1000, np.int64)))
    assert len(np.unique(places)) == 1000
    assert places.min() >= 0
    assert n // 2 < places.max() < n


def test_proportions_are_exact() -> None:
    mixture = Mixture.of({"a": 0.7, "b": 0.2, "c": 0.1})
    source, _ = mixture.locate(np.arange(10_000))
    assert np.bincount(source).tolist() == [7000, 2000, 1000]


def test_sources_are_spread_evenly() -> None:
    source, _ = Mixture.of({"a": 3, "b": 1}).locate(np.arange(400))
    taken = np.cumsum(source == 1)
    assert np.abs(taken - np.arange(1, 401) / 4).max() <= 1


def test_each_source_is_read_in_order_without_gaps() -> None:
    """Also from the middle: the same answers as walking from the start."""
    mixture = Mixture.of({"a": 0.37, "b": 0.5, "c": 0.13})
    source, ordinal = mixture.locate(np.arange(5000))
    for number in range(3):
        assert ordinal[source == number].tolist() == list(range((source == number).sum()))
    late_source, late_ordinal = mixture.locate(np.arange(4321, 5000))
    assert np.array_equal(late_source, source[4321:])
    assert np.array_equal(late_ordinal, ordinal[4321:])


def test_weights_are_rounded_to_nearest_count() -> None:
    counts = whole_counts({"a": 0.123456789, "b": 0.3333333333, "c": 1.7})
    assert counts.sum() == 65_536
    exact = np.array([0.123456789, 0.3333333333, 1.7]) / (0.123456789 + 0.3333333333 + 1.7) * 65_536
    assert np.abs(counts - exact).max() < 1


def test_too_small_weight_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"data\.mix: 'rare' has 1.0e-09 of the weight"):
        whole_counts({"common": 1.0, "rare": 1e-9})
