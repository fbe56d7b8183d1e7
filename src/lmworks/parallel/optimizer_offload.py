"""Optimizer states in host memory: the update runs there too, on host copies of what a rank owns.

device memory        the strategy's own, less the 8 bytes a parameter of Adam's moments
host memory          16 bytes for every element owned: weight, gradient, two moments
traffic per step     gradients to the host and weights back, 4 bytes each for every element owned
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .data_parallel import DataParallel, Shard


class HostOptimizer:
    """Any strategy, with leaves on the host. After writing to them, call `after_step`, as after an update."""

    def __init__(self, inner: DataParallel) -> None:
        self.inner = inner
        self.loss_factor = inner.loss_factor
        self.shard_list: list[Shard] = []
        self.gradients: list[Tensor] = []  # one host buffer for each, kept from step to step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return self.inner.micro_batch(last)

    def shards(self) -> list[Shard]:
        """Made on the first call, when the weights are there."""
        if not self.shard_list:
            for shard in self.inner.shards():
                leaf = nn.Parameter(host_like(shard.leaf).copy_(shard.leaf.detach()))
                low = None if shard.low is None else host_like(shard.low).copy_(shard.low)
                self.shard_list.append(Shard(shard.name, leaf, shard.shape, shard.rows, low))
                shard.low = None  # it lives on the host now
                self.gradients.append(host_like(shard.leaf))
        return self.shard_list

    @torch.no_grad()
    def finish(self) -> None:
        self.inner.finish()
        for mine, buffer, theirs in zip(self.shards(), self.gradients, self.inner.shards(), strict=True):
            mine.leaf.grad = None
            if theirs.leaf.grad is not None:
                mine.leaf.grad = buffer.copy_(theirs.leaf.grad, non_blocking=True)
        self.synchronize()  # the host reads them next
        self.inner.zero_grad()

    @torch.no_grad()
    def after_step(self) -> None:
        for mine, theirs in zip(self.shards(), self.inner.shards(), strict=True):
            theirs.leaf.copy_(mine.leaf, non_blocking=True)
        self.synchronize()  # the host may write them next
        self.inner.after_step()

    def synchronize(self) -> None:
        """Wait for pending copies."""
        if any(shard.leaf.is_cuda for shard in self.inner.shards()[:1]):
            torch.cuda.current_stream().synchronize()

    def zero_grad(self) -> None:
        self.inner.zero_grad()
        for shard in self.shards():
            shard.leaf.grad = None


def host_like(tensor: Tensor) -> Tensor:
    """Host memory for a copy, pinned where there is a device to copy from."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
