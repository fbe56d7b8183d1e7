"""Training on one rank: the optimizer updates the parameters themselves, without communication."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..model import GPT
from .data_parallel import Shard, take_low_bits, trained_parameters


class SingleRank:
    loss_factor = 1.0

    def __init__(self, part: GPT, adapter: str = "") -> None:
        self.part = part
        trained = trained_parameters(part, adapter)
        self.shard_list = [Shard(name, p, p.shape, None, take_low_bits(p)) for name, p in trained.items()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def shards(self) -> list[Shard]:
        return self.shard_list

    def after_step(self) -> None:
        pass

    def zero_grad(self) -> None:
        for shard in self.shard_list:  # as nn.Module.zero_grad does, without its search for parameters in every step
            shard.leaf.grad = None
