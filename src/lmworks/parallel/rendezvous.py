"""Ranks that were started again meet in a place of their own, not among what the ranks before them have left.

torchrun's agent keeps one store for all generations of its ranks. A rank that reads there the address of another before
the new one has written it waits for ever for one that is dead (PyTorch gives no generation a prefix). The number of
restarts does not tell generations apart: every node counts for itself, and a node that came later has not counted.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..spec import TrainingError

LOOK_S = 0.01


def private_store(limit: timedelta) -> Store:
    """The agent's store, under a name that this generation's rank 0 has made up and told to every other rank."""
    store, rank, world = next(rendezvous("env://", timeout=limit))
    name = meet(store, rank, world, time.monotonic() + limit.total_seconds())
    return PrefixStore(f"lmworks/{name}", store)


def meet(store: Store, rank: int, world: int, give_up: float) -> str:
    """Every other rank shows a word that nobody knew before; it is invited by one that answers to that word."""
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"lmworks/here/{rank}", mine)
        while not (answer := read(store, f"lmworks/invited/{rank}")).startswith(mine):
            wait(give_up, "rank 0")
        name = answer.removeprefix(mine)
        store.set(f"lmworks/came/{rank}", name)
        return name
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if word := read(store, f"lmworks/here/{other}"):  # of an earlier generation, maybe: then it does not come
                store.set(f"lmworks/invited/{other}", word + mine)
        missing -= {other for other in missing if read(store, f"lmworks/came/{other}") == mine}
        if missing:
            wait(give_up, f"rank {min(missing)}")
    return mine


def read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def wait(give_up: float, whom: str) -> None:
    if time.monotonic() > give_up:
        raise TrainingError(f"{whom} did not come to the meeting of all ranks; the run can be resumed")
    time.sleep(LOOK_S)
