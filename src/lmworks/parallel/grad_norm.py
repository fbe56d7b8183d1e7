"""The norm of the whole gradient under any layout.

Every element of the gradient must count once. A rank sums the squares of what it holds, each divided by the number of
ranks that hold the same elements; the sum over all ranks is then ‖g‖² of the whole model:

    ‖g‖ = √( Σ over ranks  Σ over its shards  ‖g_shard‖² / replicas(shard) )
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .data_parallel import Shard


def squared_norm(shards: list[Shard], replicas: Callable[[Shard], int]) -> Tensor:
    """This rank's share of ‖g‖², for the caller to sum over the world together with what else it sums."""
    by_count: dict[int, list[Tensor]] = {}
    for shard in shards:
        if shard.leaf.grad is not None:
            by_count.setdefault(replicas(shard), []).append(shard.leaf.grad)
    total = torch.zeros((), device=shards[0].leaf.device if shards else None)
    for count, gradients in by_count.items():
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
        total += norms.square().sum() / count
    return total
