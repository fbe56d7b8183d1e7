"""The baseline that a language model has to beat: what the previous token alone tells about the next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .store import TokenData


def bigram_loss(train: TokenData, val: TokenData, vocab_size: int) -> float:
    """Nats per token of `val` under a Witten–Bell smoothed bigram model of `train`.

    P(b | a) = (c(a, b) + t(a) · P(b)) / (c(a) + t(a)), with t(a) the number of different successors of a: a token
    that was seen with many leaves more room for others. P(b) = (c(b) + 1) / (n + vocab_size).
    """
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for keys in pair_keys(train, vocab_size):
        pairs, counts = add_counts(pairs, counts, keys)
    first = pairs // vocab_size
    total = np.bincount(first, counts, minlength=vocab_size)  # c(a)
    kinds = np.bincount(first, minlength=vocab_size)  # t(a)
    unigram = np.bincount(pairs % vocab_size, counts, minlength=vocab_size) + 1.0
    unigram /= unigram.sum()

    loss, n = 0.0, 0
    for keys in pair_keys(val, vocab_size):
        a, b = keys // vocab_size, keys % vocab_size
        place = np.minimum(np.searchsorted(pairs, keys), len(pairs) - 1)
        seen = np.where(pairs[place] == keys, counts[place], 0)
        # A token that never came before anything in train leaves nothing but P(b).
        room = np.maximum(kinds[a], 1)
        loss -= float(np.log((seen + room * unigram[b]) / (total[a] + room)).sum())
        n += len(keys)
    return loss / n


def pair_keys(data: TokenData, vocab_size: int) -> Iterator[NDArray[np.int64]]:
    """(a, b) of every two neighbours as the number a · vocab_size + b, a piece at a time."""
    last = np.empty(0, np.int64)
    for chunk in data.chunks():
        tokens = np.concatenate([last, chunk.astype(np.int64)])
        yield tokens[:-1] * vocab_size + tokens[1:]
        last = tokens[-1:]


def add_counts(
    pairs: NDArray[np.int64], counts: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted pairs and how often each was seen, with `keys` counted in: sparse, so any vocabulary will do."""
    new, new_counts = np.unique(keys, return_counts=True)
    merged, places = np.unique(np.concatenate([pairs, new]), return_inverse=True)
    sums = np.bincount(places, np.concatenate([counts, new_counts]))
    return merged, sums.astype(np.int64)
