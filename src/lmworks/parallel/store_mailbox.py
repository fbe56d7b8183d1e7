"""Messages from all ranks to rank 0 without a collective: entries in the store of the process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..spec import LMWorksError
from .rendezvous import agent_died

T = TypeVar("T")


class StoreUnavailable(LMWorksError):
    """The process that hosts the store has ended."""

    def __init__(self) -> None:
        super().__init__("the store in which ranks report their saves was lost with the agent that hosted it")


class StoreMailbox:
    """Every rank calls `put` once for each number; rank 0 polls `complete`, then calls `take`. Without a process group,
    a local variable.

    While the process that hosts the store is stopped, these calls block; once it has ended, they raise
    `StoreUnavailable`.
    """

    def __init__(self, name: str, rank: int, world: int) -> None:
        """`name`: unique for every mailbox."""
        self.prefix, self.rank, self.world = f"lmworks/{name}", rank, world
        self.store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self.local_message = ""

    def key(self, number: int, what: int | str) -> str:
        return f"{self.prefix}/{number}/{what}"

    def call_store(self, call: Callable[..., T], *arguments: Any) -> T:
        if agent_died():
            raise StoreUnavailable
        try:
            return call(*arguments)
        except RuntimeError:  # DistError among them, with a C++ stack for its text
            raise StoreUnavailable from None

    def put(self, number: int, message: str) -> None:
        if self.store is None:
            self.local_message = message
            return
        self.call_store(self.store.set, self.key(number, self.rank), message)
        self.call_store(self.store.add, self.key(number, "done"), 1)

    def complete(self, number: int) -> bool:
        return self.store is None or self.call_store(self.store.add, self.key(number, "done"), 0) == self.world

    def take(self, number: int) -> list[str]:
        """The messages of all ranks; they are deleted."""
        if self.store is None:
            return [self.local_message]
        keys = [self.key(number, rank) for rank in range(self.world)]
        messages = [self.call_store(self.store.get, key).decode() for key in keys]
        for key in (*keys, self.key(number, "done")):
            self.call_store(self.store.delete_key, key)
        return messages
