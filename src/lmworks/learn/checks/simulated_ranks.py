"""Ranks as threads of the check, with links that count what is sent. When all wait, that is said at once."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checking.expect import Mismatch

PATIENCE_S = 10.0  # of a rank that computes without end, while the others wait for it


class Stuck(Exception):
    """This rank waits for a message that nobody sends any more."""


@dataclass
class Network:
    """Messages between `ranks` ranks, and how many bytes each rank has sent in how many messages.

    Whole numbers are not counted: they are indices, or how many rows follow.
    """

    ranks: int
    bytes_sent: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bytes_sent, self.messages = [0] * self.ranks, [0] * self.ranks
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.waiting: dict[int, tuple[int, int]] = {}
        self.done: set[int] = set()
        self.stuck = False

    def count(self, source: int, x: Tensor) -> None:
        if x.is_floating_point():
            self.bytes_sent[source] += x.numel() * x.element_size()
            self.messages[source] += 1

    def send(self, source: int, to: int, x: Tensor) -> None:
        with self.changed:
            self.queues[source, to].append(x.detach().clone())
            self.changed.notify_all()

    def receive(self, source: int, to: int) -> Tensor:
        with self.changed:
            self.waiting[to] = (source, to)
            self.look()
            while not self.queues[source, to]:
                if self.stuck or not self.changed.wait(PATIENCE_S):
                    raise Stuck
            del self.waiting[to]
            return self.queues[source, to].popleft()

    def end(self, rank: int) -> None:
        with self.changed:
            self.done.add(rank)
            self.look()

    def look(self) -> None:
        """Whether every rank has ended or waits for what is not under way."""
        if len(self.done) < self.ranks and len(self.done | set(self.waiting)) == self.ranks:
            self.stuck = not any(self.queues[way] for rank, way in self.waiting.items() if rank not in self.done)
            self.changed.notify_all()


@dataclass(frozen=True)
class SimulatedLink:
    """What `communication/links.py` has over gloo."""

    rank: int
    network: Network

    @property
    def ranks(self) -> int:
        return self.network.ranks

    def exchange(self, to: int, x: Tensor, source: int) -> Tensor:
        self.network.count(self.rank, x)
        self.network.send(self.rank, to, x)
        got = self.network.receive(source, self.rank)
        if got.shape != x.shape:
            remark = "both messages of an exchange have one shape"
            raise Mismatch(f"{self.ranks} ranks: an exchange", tuple(x.shape), tuple(got.shape), remark=remark)
        return got

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Its own bytes are counted once, however it would be done."""
        self.network.count(self.rank, x)
        everyone = range(self.ranks)
        for other in everyone:
            self.network.send(self.rank, other, x)
        parts = torch.stack([self.network.receive(other, self.rank) for other in everyone])
        return parts.amax(0) if op == "max" else parts.sum(0)

    def all_to_all(self, x: Tensor, to: list[int], of: list[int]) -> Tensor:
        """Rows that stay are not counted."""
        for other, rows in enumerate(x.split(to)):
            if other != self.rank:
                self.network.count(self.rank, rows)
            self.network.send(self.rank, other, rows)
        parts = [self.network.receive(other, self.rank) for other in range(self.ranks)]
        if (sent := [len(rows) for rows in parts]) != of:
            remark = f"rank {self.rank} asks for other numbers of rows than the ranks send it"
            raise Mismatch(f"{self.ranks} ranks: an all-to-all, rows of each rank", sent, of, remark=remark)
        return torch.cat(parts)


def on_ranks(
    case: str, inputs: Sequence[Any], function: Callable[[Any, SimulatedLink], Any]
) -> tuple[list[Any], Network]:
    """What `function` of an input and a link returns on each rank, and the network with its counts."""
    ranks = len(inputs)
    network = Network(ranks)
    results: list[Any] = [None] * ranks
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(inputs[rank], SimulatedLink(rank, network))
        except Exception as error:
            errors[rank] = error
        finally:
            network.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        if not isinstance(errors[rank], Stuck):
            raise errors[rank]
    if errors:
        waiting = ", ".join(f"rank {rank} for rank {network.waiting[rank][0]}" for rank in sorted(errors))
        remark = f"at the end ranks wait for messages that nobody sends: {waiting}"
        raise Mismatch(case, "every rank ends", f"{len(errors)} of {ranks} ranks wait", remark=remark)
    return results, network
