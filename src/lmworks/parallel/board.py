"""What ranks leave for the lead without waiting for it: entries of the store through which they once met."""

from __future__ import annotations

import torch.distributed as dist


class Board:
    """`put` once a rank and number; the lead looks whether it is `complete`, and then may `take` it. Alone, a variable.

    Whoever hosts the store answers: where that process is stopped, a rank waits here for it, as for any other.
    """

    def __init__(self, name: str, rank: int, world: int) -> None:
        """`name`: another for every use of the store."""
        self.prefix, self.rank, self.world = f"lmworks/{name}", rank, world
        self.store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self.alone = ""

    def key(self, number: int, what: int | str) -> str:
        return f"{self.prefix}/{number}/{what}"

    def put(self, number: int, message: str) -> None:
        if self.store is None:
            self.alone = message
            return
        self.store.set(self.key(number, self.rank), message)
        self.store.add(self.key(number, "done"), 1)

    def complete(self, number: int) -> bool:
        return self.store is None or self.store.add(self.key(number, "done"), 0) == self.world

    def take(self, number: int) -> list[str]:
        """The messages of all ranks, which are then gone."""
        if self.store is None:
            return [self.alone]
        keys = [self.key(number, rank) for rank in range(self.world)]
        messages = [self.store.get(key).decode() for key in keys]
        for key in (*keys, self.key(number, "done")):
            self.store.delete_key(key)
        return messages
