"""The network as an op list: embedding, blocks, loss, and the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import ModelSpec, components
from . import eager, fused
from .ops import Kernel, Op, Workload, stream
from .software import Software


@dataclass(frozen=True)
class Network:
    """Ops of the embedding, of one block, and of head and loss."""

    load: Workload
    stem: tuple[Op, ...]
    block: tuple[Op, ...]
    loss: tuple[Op, ...]

    @property
    def halves(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """Of a block: attention, and the MLP or the experts with the norm before them."""
        middle = [op.name for op in self.block].index("mlp norm")
        return self.block[:middle], self.block[middle:]


def network(load: Workload) -> Network:
    """By code base: our eager blocks op by op, or the list of fused kernels."""
    if load.software.fused or (load.software.stream == 2 and not load.software.name.startswith("lmworks")):
        last = eager.loss(load) if load.software.loss == "chunked" else fused.loss(load)
        return Network(load, tuple(fused.stem(load)), tuple(eager.mean_block(load, fused.block)), tuple(last))
    return Network(
        load, tuple(eager.embedding(load)), tuple(eager.mean_block(load, eager.block)), tuple(eager.loss(load))
    )


def trained_params(model: ModelSpec, adapters: tuple[components.Weight, ...]) -> int:
    """All, or those of adapters and a scalar head."""
    if not adapters:
        return model.params
    return model.layers * sum(weight.size for weight in adapters) + model.hidden * model.scalar_head


def optimizer(params: int, software: Software, states: float) -> list[Op]:
    """Gradient clipping, and the update of so many, which reads p, g and states and writes p and states."""
    numbers = params * software.gradients / 4  # in units of 4 bytes
    clip = Op("clip", "optimizer", (stream(software.clip_passes * numbers),))
    each = 2 * (software.weights + software.low_bytes + states) + software.gradients
    return [clip, Op("update", "optimizer", (Kernel("optimizer", bytes=1.0 * each * params),))]
