"""What a sampler needs of the trained weights: those that it does not have yet, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from ..model.lora import merged_weight, split_adapter_name
from ..parallel.parallel_model import ParallelModel
from ..spec import RunSpec
from ..spec.lora import DEFAULT_ADAPTER, adapter_of

Gather = Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]
"""The weights of these names, one at a time; called by all ranks."""


class WeightUpdates:
    """With adapters a sampler gets the frozen weights once, and every time the products of layers that have one."""

    def __init__(self, spec: RunSpec, parallel_model: ParallelModel) -> None:
        self.spec, self.parallel_model = spec, parallel_model
        self.names = {name for name in parallel_model.names() if not adapter_of(name)}
        self.adapted = {f"{layer}.weight" for name in parallel_model.names() if (layer := layer_of(name))}
        self.sent: set[str] = set()  # frozen weights that the sampler has a copy of

    @torch.no_grad()
    def changed(self, shared: Collection[str] = (), gather: Gather | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights that may have changed, in the same order on all ranks, without those that are `shared`: whole, or
        what `gather` makes of them."""
        model = self.parallel_model
        gather = gather or model.whole_weights
        if not self.adapted:
            yield from gather(self.names - set(shared))
            yield from model.buffers().items()
            return
        frozen = self.names - set(shared) - self.adapted - self.sent
        yield from gather(frozen)
        yield from model.buffers().items()  # the choice bias of experts is no weight, and changes
        self.sent |= frozen
        base: Tensor | None = None
        matrices: dict[str, Tensor] = {}
        adapters = {name for name in model.names() if layer_of(name)}
        for name, whole in gather(self.adapted | adapters):
            if name in self.adapted:
                base, matrices = whole, {}
                continue
            matrices[name.rpartition(".")[2]] = whole
            assert base is not None  # a layer's adapters come after its weight
            if len(matrices) == (3 if self.spec.lora.dora else 2):
                down, up, magnitude = map(matrices.get, ("lora_A", "lora_B", "magnitude"))
                assert down is not None and up is not None
                yield f"{layer_of(name)}.weight", merged_weight(base, down, up, self.spec.lora.scale, magnitude)


def layer_of(name: str) -> str:
    """The layer of an adapter's weight, of the adapter that is trained; empty for other weights."""
    place = split_adapter_name(name)
    return place[0] if place is not None and place[1] == DEFAULT_ADAPTER else ""
