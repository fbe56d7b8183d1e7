"""What ranks leave for the lead without waiting for it: entries of the store through which they once met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..spec import LMWorksError
from . import elastic_agent

T = TypeVar("T")


class MailboxGone(LMWorksError):
    """Whoever hosts the store has ended."""

    def __init__(self) -> None:
        super().__init__("the store in which ranks tell of their saves is gone with the agent that started them")


class StoreMailbox:
    """`put` once a rank and number; the lead looks whether it is `complete`, and then may `take` it. Alone, a variable.

    Whoever hosts the store answers: where that process is stopped, a rank waits here for it, as for any other; where it
    has ended, each of these raises `MailboxGone`.
    """

    def __init__(self, name: str, rank: int, world: int) -> None:
        """`name`: another for every use of the store."""
        self.prefix, self.rank, self.world = f"lmworks/{name}", rank, world
        self.store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self.alone = ""

    def key(self, number: int, what: int | str) -> str:
        return f"{self.prefix}/{number}/{what}"

    def ask(self, call: Callable[..., T], *arguments: Any) -> T:
        if elastic_agent.gone():
            raise MailboxGone
        try:
            return call(*arguments)
        except RuntimeError:  # DistError among them, with a C++ stack for its text
            raise MailboxGone from None

    def put(self, number: int, message: str) -> None:
        if self.store is None:
            self.alone = message
            return
        self.ask(self.store.set, self.key(number, self.rank), message)
        self.ask(self.store.add, self.key(number, "done"), 1)

    def complete(self, number: int) -> bool:
        return self.store is None or self.ask(self.store.add, self.key(number, "done"), 0) == self.world

    def take(self, number: int) -> list[str]:
        """The messages of all ranks, which are then gone."""
        if self.store is None:
            return [self.alone]
        keys = [self.key(number, rank) for rank in range(self.world)]
        messages = [self.ask(self.store.get, key).decode() for key in keys]
        for key in (*keys, self.key(number, "done")):
            self.ask(self.store.delete_key, key)
        return messages
