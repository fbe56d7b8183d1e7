"""A further adapter over the base of a parallelized model, as a model of its own: critic, reward model, reference.

The network and its layout over the ranks are those of the other model. What is its own are the shards of its adapter,
if it is trained: gradients, norms, optimizer states and checkpoints of the two do not touch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..data import Batch
from ..model.lora import use_adapter
from ..spec import RunSpec
from .data_parallel import DataParallel
from .expert_parallel import expert_names
from .optimizer_offload import HostOptimizer
from .parallel_model import ParallelModel
from .parallelize import wrap_data_parallel


class AdapterModel(ParallelModel):
    """`adapter` None: the base alone. A strategy of its own only where it is trained."""

    def __init__(self, other: ParallelModel, adapter: str | None, strategy: DataParallel | None = None) -> None:
        strategies = other.strategies if strategy is None else {0: strategy}
        super().__init__(other.spec, other.mesh, other.device, other.sharding, other.parts, strategies)
        self.adapter = adapter

    def forward(self, batch: Batch, **options: Any) -> Any:
        with use_adapter(self.parts[0], self.adapter):
            return super().forward(batch, **options)

    def buffers(self) -> dict[str, Tensor]:
        """Those of the network belong to the other model."""
        return {}


def trained_adapter(other: ParallelModel, adapter: str, spec: RunSpec) -> AdapterModel:
    """A model that updates the adapter alone, by the data-parallel strategy of `spec`."""
    return AdapterModel(other, adapter, adapter_strategy(other, adapter, spec))


def adapter_strategy(other: ParallelModel, adapter: str, spec: RunSpec) -> DataParallel:
    part, strategy = other.parts[0], other.strategies[0]
    inner = strategy.inner if isinstance(strategy, HostOptimizer) else strategy
    experts = expert_names(part) if other.size("ep") > 1 else set()
    own: DataParallel | None = None
    if other.mesh is not None:
        from .fsdp2 import FSDP2

        own = inner.of_adapter(adapter) if isinstance(inner, FSDP2) else None
    own = own or wrap_data_parallel(part, spec, other.mesh, experts, adapter)
    return HostOptimizer(own) if isinstance(strategy, HostOptimizer) else own
