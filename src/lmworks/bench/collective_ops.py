"""The collectives of `lmworks bench collectives`: how each is called, in and out of place, and what it must return.

Sizes are nccl-tests': of the whole buffer, gathered or not yet reduced; of a broadcast or a send, the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send")
OUT_OF_PLACE_ONLY = ("all-to-all", "send")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class Group:
    """A process group of this rank, by global ranks in order."""

    handle: Any
    ranks: tuple[int, ...]
    rank: int  # this rank's place among them

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Call:
    """`fill` writes fresh input, `run` is what is timed, `wrong` counts the elements that are not as they should be."""

    fill: Callable[[], None]
    run: Callable[[], object]
    wrong: Callable[[], int]
    nbytes: int
    messages: int = 1  # one after another in one call


def make_call(op: str, in_place: bool, nbytes: int, dtype: str, device: torch.device, group: Group) -> Call:
    """`nbytes` is rounded down to a multiple of the ranks and of the element."""
    kind, n, rank = DTYPES[dtype], group.size, group.rank
    count = max(1, nbytes // kind.itemsize // n) * n
    part = count // n
    tile = torch.arange(4, device=device)
    high = 4 if n <= 64 else 2  # sums stay small enough to be exact in bf16

    def repeated(small: Tensor, length: int) -> Tensor:
        return small.to(kind).repeat(-(-length // len(small)))[:length]

    def value(source: int, start: int = 0, length: int = count) -> Tensor:
        """What rank `source` holds at these positions: (position + rank) mod 4, small integers."""
        return repeated((tile + start + source) % high, length)

    def total(start: int = 0, length: int = count) -> Tensor:
        return repeated(sum(((tile + start + source) % high for source in range(n)), torch.zeros_like(tile)), length)

    whole, other = torch.empty(count, dtype=kind, device=device), torch.empty(count, dtype=kind, device=device)
    mine = slice(rank * part, (rank + 1) * part)

    def differ(found: Tensor, expected: Tensor) -> int:
        return int((found != expected).sum())

    def fill_whole() -> None:
        whole.copy_(value(rank))

    if op == "all-reduce":  # torch.distributed reduces in place; out of place, the copy is part of the call

        def reduce_copy() -> None:
            other.copy_(whole)
            dist.all_reduce(other, group=group.handle)

        result = whole if in_place else other
        run = (lambda: dist.all_reduce(whole, group=group.handle)) if in_place else reduce_copy
        return Call(fill_whole, run, lambda: differ(result, total()), whole.nbytes)
    if op == "broadcast":

        def broadcast_copy() -> None:
            if rank == 0:
                other.copy_(whole)
            dist.broadcast(other, group.ranks[0], group=group.handle)

        result = whole if in_place else other
        run = (lambda: dist.broadcast(whole, group.ranks[0], group=group.handle)) if in_place else broadcast_copy
        return Call(fill_whole, run, lambda: differ(result, value(0)), whole.nbytes)
    if op == "all-gather":
        piece = whole[mine] if in_place else other[:part]

        def fill_piece() -> None:
            whole.zero_()
            piece.copy_(value(rank, rank * part, part))

        def expected() -> Tensor:
            return torch.cat([value(source, source * part, part) for source in range(n)])

        return Call(
            fill_piece,
            lambda: dist.all_gather_into_tensor(whole, piece, group=group.handle),
            lambda: differ(whole, expected()),
            whole.nbytes,
        )
    if op == "reduce-scatter":
        piece = whole[mine] if in_place else other[:part]
        return Call(
            fill_whole,
            lambda: dist.reduce_scatter_tensor(piece, whole, group=group.handle),
            lambda: differ(piece, total(rank * part, part)),
            whole.nbytes,
        )
    if op == "all-to-all":

        def from_all() -> Tensor:
            return torch.cat([value(source, rank * part, part) for source in range(n)])

        return Call(
            fill_whole,
            lambda: dist.all_to_all_single(other, whole, group=group.handle),
            lambda: differ(other, from_all()),
            whole.nbytes,
        )
    return send_between(group, whole, other, value, differ)


def send_between(
    group: Group, whole: Tensor, other: Tensor, value: Callable[[int], Tensor], differ: Callable[[Tensor, Tensor], int]
) -> Call:
    """A ping-pong between the first rank of the group and the last: two messages, one after the other."""
    ends = (0, group.size - 1)
    peer = group.size - 1 - group.rank

    def fill() -> None:
        whole.copy_(value(group.rank))
        other.zero_()

    def ping_pong() -> None:
        for sender in ends if group.rank in ends else ():
            if group.rank == sender:
                dist.send(whole, group.ranks[peer], group=group.handle)
            else:
                dist.recv(other, group.ranks[peer], group=group.handle)

    return Call(fill, ping_pong, lambda: differ(other, value(peer)) if group.rank in ends else 0, whole.nbytes, 2)


def group_layout(name: str, ranks: int, per_node: int) -> list[tuple[int, ...]]:
    """Disjoint groups of global ranks that run at once.

    `all`; `intra`: a node's; `inter`: the same local rank of every node; a number: the first so many ranks.
    """
    everyone: Sequence[int] = range(ranks)
    if name == "all":
        return [tuple(everyone)]
    if name == "intra":
        return [tuple(everyone[first : first + per_node]) for first in range(0, ranks, per_node)]
    if name == "inter":
        return [tuple(everyone[local::per_node]) for local in range(per_node)]
    return [tuple(everyone[: int(name)])]
