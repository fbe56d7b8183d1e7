"""Byte-pair encoding: a vocabulary from counts, and words cut by it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

Pair = tuple[str, str]


def train_bpe(words: dict[str, int], merges: int) -> list[Pair]:
    """The pairs that are merged, in order, from words and how often each occurs. It stops where no pair is left.

    Of equally frequent pairs the first in alphabetical order is merged.
    """
    # exercise bpe.train(words, merges)
    cut = {word: list(word) for word in words}
    found: list[Pair] = []
    for _ in range(merges):
        counts: Counter[Pair] = Counter()
        for word, pieces in cut.items():
            for pair in pairwise(pieces):
                counts[pair] += words[word]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        found.append(best)
        cut = {word: merge(pieces, best) for word, pieces in cut.items()}
    return found
    # end bpe.train


def merge(pieces: list[str], pair: Pair) -> list[str]:
    """With every occurrence of the pair joined, from left to right."""
    # exercise bpe.merge(pieces, pair)
    out: list[str] = []
    for piece in pieces:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out
    # end bpe.merge


def encode(word: str, merges: list[Pair]) -> list[str]:
    """A word cut by the merges, in the order in which they were learned."""
    # exercise bpe.encode(word, merges)
    pieces = list(word)
    for pair in merges:
        pieces = merge(pieces, pair)
    return pieces
    # end bpe.encode
