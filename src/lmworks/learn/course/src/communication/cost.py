"""What a collective costs: α seconds for each round, β seconds for each byte.

    python src/communication/cost.py

prints the times of two all-reduces on 64 ranks, and from which size on the ring is the faster one.
"""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def ring_seconds(ranks: int, nbytes: float, alpha: float, beta: float) -> float:
    """An all-reduce around a ring: a reduce-scatter and an all-gather, of a chunk a round."""
    # exercise alpha_beta.ring(ranks, nbytes, alpha, beta)
    rounds = 2 * (ranks - 1)
    return rounds * (alpha + nbytes / ranks * beta)
    # end alpha_beta.ring


def tree_seconds(ranks: int, nbytes: float, alpha: float, beta: float) -> float:
    """An all-reduce by a binary tree, up to the root and down again; every message is the whole buffer."""
    # exercise alpha_beta.tree(ranks, nbytes, alpha, beta)
    rounds = 2 * (ranks - 1).bit_length()
    return rounds * (alpha + nbytes * beta)
    # end alpha_beta.tree


def crossover_bytes(ranks: int, alpha: float, beta: float) -> float:
    """The size from which on the ring is faster than the tree, of two ranks or more; 0 where it always is."""
    # exercise alpha_beta.crossover(ranks, alpha, beta)
    more_rounds = 2 * (ranks - 1) - 2 * (ranks - 1).bit_length()
    fewer_buffers = 2 * (ranks - 1).bit_length() - 2 * (ranks - 1) / ranks
    return more_rounds * alpha / (fewer_buffers * beta)
    # end alpha_beta.crossover


def main() -> None:
    ranks, alpha, beta = 64, 5e-6, 1 / 50e9
    for nbytes in (1e3, 1e5, 1e7, 1e9):
        times = (1e6 * seconds(ranks, nbytes, alpha, beta) for seconds in (ring_seconds, tree_seconds))
        print(f"{nbytes:>14,.0f} bytes: " + ", ".join(f"{one:,.0f} µs" for one in times) + " (ring, tree)")
    print(f"the ring is faster from {crossover_bytes(ranks, alpha, beta):,.0f} bytes on")


if __name__ == "__main__":
    main()
