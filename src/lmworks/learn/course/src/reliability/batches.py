"""Batches as a function of (seed, step): a run that is resumed reads what the uninterrupted one would have read."""

from __future__ import annotations

import torch

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def batch_at(seed: int, step: int, batch: int, documents: int, rank: int = 0, ranks: int = 1) -> list[int]:
    """The documents that a rank reads in a step: its part, in order, of the `batch` documents of all ranks.

    Every epoch (once through all documents) has a random order of its own, and a batch may reach into the next one.
    ranks divides batch. Nothing else decides: neither earlier calls nor the number of ranks nor other random numbers.
    """
    # exercise resumable_batches(seed, step, batch, documents, rank, ranks)
    found, part = [], batch // ranks
    for place in range(step * batch + rank * part, step * batch + (rank + 1) * part):
        epoch, index = divmod(place, documents)
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        found.append(int(torch.randperm(documents, generator=generator)[index]))
    return found
    # end resumable_batches
