"""What a training step minimises.

A loss is a sum over units (tokens, pairs of answers, sequences …), divided by the units of the global batch: uneven
micro-batches on any number of ranks then give the gradients of one large batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batch
from ..parallel.parallel_model import next_token_loss

Forward = Callable[..., Any]  # (batch, **options of GPT.forward) → what the model returns for this rank's share of it


class Objective:
    """Next-token prediction: the sum of −log p over the targets that count."""

    unit = "token"
    needs_global_batch = False  # whether `before_passes` has to see the micro-batches of a step
    supports_async = True  # whether the passes of a step may be launched before the step before them was read

    def units(self, batch: Batch) -> int:
        """What the loss of a micro-batch is a sum over."""
        return batch.count()

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        return next_token_loss(forward, batch)

    def before_passes(self, forward: Forward, batches: Sequence[Batch], group: dist.ProcessGroup | None) -> None:
        """What the loss of a micro-batch needs to know of the global batch; `group`: data-parallel ranks."""

    def reset_metrics(self) -> None:
        """Before the micro-batches of a step."""

    def metrics(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Of the micro-batches since the last reset, over all data-parallel ranks."""
        return {}


class MetricSums:
    """Sums and weights of named metrics on the device; their means over all ranks in one all-reduce.

    Of names that end in /max, the largest value.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Values of a micro-batch, equally weighted where there are no weights."""
        values = values.detach().double()
        if name.endswith("/max"):
            self.largest[name] = torch.maximum(values.max(), self.largest.get(name, values.max()))
            return
        weights = torch.ones_like(values) if weights is None else weights.double()
        both = torch.stack([(values * weights).sum(), weights.sum()])
        self.sums[name] = self.sums[name] + both if name in self.sums else both

    def means(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The same names on every rank."""
        if not self.sums:
            return {}
        table = torch.stack(list(self.sums.values()))
        largest = torch.stack(list(self.largest.values())) if self.largest else None
        if group is not None:
            dist.all_reduce(table, group=group)
            if largest is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        totals = zip(self.sums, table.tolist(), strict=True)
        means = {name: total / weight if weight else math.nan for name, (total, weight) in totals}
        return means | ({} if largest is None else dict(zip(self.largest, largest.tolist(), strict=True)))
