"""A rank's way to the others. Checks have simulated links that count bytes; here they are gloo's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Link:
    """Of one rank: `rank` of `ranks`."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def exchange(self, to: int, x: Tensor, source: int) -> Tensor:
        """Sends x to one rank and returns what another sends, of the same shape, both at once."""
        got = torch.empty_like(x)
        sending = dist.isend(x.contiguous(), to)
        dist.recv(got, source)
        sending.wait()
        return got

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum, or the "max", over all ranks; x is left as it is."""
        total = x.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return total

    def all_to_all(self, x: Tensor, to: list[int], of: list[int]) -> Tensor:
        """The first to[0] rows of x go to rank 0, the next to[1] to rank 1, …; returns of[0] rows of rank 0, …"""
        got = x.new_empty(sum(of), *x.shape[1:])
        dist.all_to_all_single(got, x.contiguous(), of, to)
        return got
