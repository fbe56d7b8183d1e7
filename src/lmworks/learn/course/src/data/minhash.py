"""Near-duplicates among millions of documents, without comparing each with each."""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

PRIME = 2**61 - 1


def signature(shingles: set[int], functions: list[tuple[int, int]]) -> list[int]:
    """For each hash function x → (a · x + b) mod PRIME, given as (a, b): its least value over the shingles."""
    # exercise minhash.signature(shingles, functions)
    return [min((a * shingle + b) % PRIME for shingle in shingles) for a, b in functions]
    # end minhash.signature


def similarity(one: list[int], other: list[int]) -> float:
    """The estimate of |A ∩ B| / |A ∪ B| from two signatures."""
    # exercise minhash.similarity(one, other)
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
    # end minhash.similarity


def chance(similar: float, bands: int, rows: int) -> float:
    """That two documents agree in all `rows` numbers of at least one of `bands` bands of their signatures."""
    # exercise minhash.chance(similar, bands, rows)
    return 1 - (1 - similar**rows) ** bands
    # end minhash.chance
