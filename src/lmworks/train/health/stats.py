"""Statistics of every block in one step: activations, gradients, weights and updates.

Sums are computed on the device, and all-reduced twice at the end of the step. Every element counts once: what several
ranks hold is divided by the number of replicas, as in the gradient norm. Weights from before the update are kept in
host memory for that one step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...parallel.data_parallel import Shard
from ...parallel.parallel_model import ParallelModel
from ...record.metrics import PartStats

OUTSIDE_BLOCKS = ("embed", "positions"), ("norm", "head")  # before and after the blocks
SUMS = ("abs", "square", "count", "grad", "param", "update")


class BlockStats:
    """`with BlockStats(model) as stats:` around the passes, then `before_update`, the update, `after_update`."""

    def __init__(self, parallel_model: ParallelModel) -> None:
        self.parallel_model = parallel_model
        self.rows = [*OUTSIDE_BLOCKS[0], *map(str, range(parallel_model.spec.model.layers)), *OUTSIDE_BLOCKS[1]]
        self.sums = torch.zeros(len(self.rows), len(SUMS), dtype=torch.float64, device=parallel_model.device)
        self.largest = torch.zeros(len(self.rows), dtype=torch.float64, device=parallel_model.device)
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        self.compiled: list[tuple[nn.Module, Any]] = []
        self.before: list[Tensor] = []

    def __enter__(self) -> Self:
        for part in self.parallel_model.parts.values():
            for name, block in part.blocks.items():
                record = partial(self.activation, self.rows.index(name))
                if block._compiled_call_impl is not None:  # compiled code ignores hooks that are added later
                    self.compiled.append((block, block._compiled_call_impl))
                    block._compiled_call_impl = with_hook(block._compiled_call_impl, record)
                else:
                    self.handles.append(block.register_forward_hook(lambda _m, _i, out, record=record: record(out)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        for block, compiled in self.compiled:
            block._compiled_call_impl = compiled

    @torch.no_grad()
    def activation(self, row: int, output: Tensor) -> None:
        size = output.detach().abs()
        wide = size.double()
        self.sums[row, :3] += torch.stack([wide.sum(), wide.square().sum(), wide.new_tensor(float(wide.numel()))])
        self.largest[row] = torch.maximum(self.largest[row], size.max())

    @torch.no_grad()
    def before_update(self, scale: float) -> None:
        """Gradients are reduced, and not yet clipped; `scale` is the loss scale."""
        for shard in self.parallel_model.shards:
            if shard.leaf.grad is not None:
                self.add(shard, "grad", shard.leaf.grad, scale)
        self.before = [shard.leaf.detach().to("cpu", copy=True) for shard in self.parallel_model.shards]

    @torch.no_grad()
    def after_update(self) -> None:
        for shard, before in zip(self.parallel_model.shards, self.before, strict=True):
            self.add(shard, "param", shard.leaf)
            self.add(shard, "update", shard.leaf - before.to(shard.leaf.device))
        self.before = []

    def add(self, shard: Shard, what: str, values: Tensor, scale: float = 1.0) -> None:
        square = values.detach().double().square().sum() / (scale * scale * self.parallel_model.replicas(shard))
        self.sums[self.rows.index(row_of(shard.name)), SUMS.index(what)] += square.to(self.sums.device)

    def collect(self) -> dict[str, PartStats]:
        """Over all ranks, by part of the model. A collective call."""
        if self.parallel_model.mesh is not None:
            dist.all_reduce(self.sums)
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        found: dict[str, PartStats] = {}
        for name, sums, largest in zip(self.rows, self.sums.tolist(), self.largest.tolist(), strict=True):
            absolute, square, count, grad, param, update = sums
            row: PartStats = {}
            if count:
                row |= {"act_mean_abs": absolute / count, "act_rms": (square / count) ** 0.5, "act_max": largest}
            if param:
                row |= {"grad_norm": grad**0.5, "param_norm": param**0.5, "update_ratio": (update / param) ** 0.5}
            if row:
                found[name] = row
        return found


def row_of(name: str) -> str:
    """blocks.3.mlp.up.weight belongs to block 3, head.weight to the head."""
    first, second, *_ = name.split(".")
    return second if first == "blocks" else first


def with_hook(call: Callable[..., Any], record: Callable[[Any], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        record(result)
        return result

    return both
