"""The weights that one rank holds before data parallelism: a stage of a pipeline and a shard of each weight.

Which dimension tensor and expert parallelism shard is part of the description of a component (`spec/components.py`).
Data parallelism comes after that and shards what is left (`shards.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...spec import ModelSpec, ParallelSpec, components
from ..pipelines.stages import Stage

ROOT = components.ROOT  # the unit of weights outside blocks: embedding, last norm, head


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    unit: int  # the block it belongs to, or ROOT
    expert: bool = False  # other experts lie on other ranks: its gradient meets over "edp"
    partial: bool = False  # whole on every tensor-parallel rank, each of which finds a part of its gradient

    @property
    def inside(self) -> str:
        """Its name within the block, or within the network."""
        return self.name if self.unit == ROOT else self.name.split(".", 2)[2]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.size // self.rows

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(model: ModelSpec, stage: Stage | None = None) -> list[Weight]:
    """As `GPT(model).named_parameters()` has them, of all or of one stage; a tied head is no weight of its own."""
    return [Weight(weight.name, weight.shape, weight.layer) for weight in described(model, stage)]


def described(model: ModelSpec, stage: Stage | None) -> list[components.Weight]:
    if stage is None:
        return components.weights(model)
    found = []
    if stage.first or (stage.last and model.tie_embeddings):
        embedding = list(components.embedding_weights(model))
        found += embedding if stage.first else embedding[:1]
    for layer in stage.layers:
        found += components.layer_weights(model, layer)
    return [*found, *(components.head_weights(model) if stage.last else ())]


def local_weight(weight: components.Weight, layout: ParallelSpec) -> Weight:
    shape = list(weight.shape)
    expert = layout.ep > 1 and weight.experts > 0
    if expert:
        shape[0] //= layout.ep
    if (dim := weight.sharded(layout.tp)) is not None:
        shape[dim] //= layout.tp
    return Weight(weight.name, tuple(shape), weight.layer, expert, weight.has_partial_grad(layout.tp, layout.sp))
