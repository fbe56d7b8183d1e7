"""Weights from the trainer's layout to the shards of tensor-parallel inference (`Weight.inference_part`).

Groups of `tp` consecutive ranks hold a copy of the network between them. From FSDP2, which gives each of n ranks
⌈rows/n⌉ rows of a weight, it is one all-to-all a weight: every rank sends to each what that needs of its rows, and
none ever holds the whole. Where both cut alike (outputs of column-parallel layers over as many ranks), nothing travels:

    FSDP2 over 4   column-parallel (rows) over 4   row-parallel (columns) over 4
    0 0 0 0        0 0 0 0                         0 1 2 3
    1 1 1 1        1 1 1 1                         0 1 2 3
    2 2 2 2        2 2 2 2                         0 1 2 3
    3 3 3 3        3 3 3 3                         0 1 2 3

Weights that training has cut by tensor parallelism over as many ranks are theirs already; from any other layout they
are gathered one at a time, and cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..spec import ModelSpec, RunSpec, components
from ..spec.components import Weight, overlap
from ..spec.lora import block_adapter_weights
from .collectives import all_to_all
from .initial_weights import is_sharded
from .parallel_model import ParallelModel, named_weights


class InferenceShards:
    """Those of this rank. Collective: all ranks ask for the same names."""

    def __init__(self, model: ParallelModel, tp: int) -> None:
        self.model, self.tp, self.rank = model, tp, dist.get_rank() % tp
        self.described = described_weights(model.spec)
        self.received = 0  # bytes from other ranks by all-to-alls

    def weights(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        model, same_tp = self.model, self.model.size("tp") == self.tp
        assert model.mesh is not None
        sharding = model.sharding.without("tp", model.mesh) if same_tp else model.sharding
        for name, held in named_weights(model.parts[0]):
            if name not in names:
                continue
            if model.size("tp") == 1 and isinstance(held, Tensor) and is_sharded(held) and not sharding.axes(name):
                yield name, self.reshard(held, self.described[inside(name)])
            elif same_tp:
                yield name, self.key_rows(name, model.gather(name, held, sharding))
            else:
                yield name, self.cut(name, model.gather(name, held, sharding))

    def cut(self, name: str, weight: Tensor) -> Tensor:
        return block(weight, self.described[inside(name)].inference_part(self.tp, self.rank))

    def key_rows(self, name: str, weight: Tensor) -> Tensor:
        """Training keeps keys and values whole where ranks outnumber their heads."""
        weight_of = self.described[inside(name)]
        return self.cut(name, weight) if weight_of.sharded(self.tp) is None else weight

    def reshard(self, weight: Any, weight_of: Weight) -> Tensor:
        """A DTensor of FSDP2 to this rank's shard."""
        (axis,) = (dim for dim, placement in enumerate(weight.placements) if placement.is_shard())
        group = weight.device_mesh.get_group(axis)
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
        wanted = [weight_of.inference_part(self.tp, rank % self.tp) for rank in ranks]
        if all(part == wanted[0] for part in wanted):  # replicated
            return block(weight.full_tensor(), wanted[me])
        held = components.rows_of_ranks(weight_of.shape[0], len(ranks))
        local = weight.to_local()
        blocks = [block(local, (shifted(overlap(held[me], part[0]), held[me]), *part[1:])) for part in wanted]
        if not any(overlap(rows, part[0]) for i, rows in enumerate(held) for j, part in enumerate(wanted) if i != j):
            return blocks[me]
        others = math.prod(map(len, wanted[me][1:]))
        sizes = [others * len(overlap(rows, wanted[me][0])) for rows in held]
        sent = torch.cat([each.reshape(-1) for each in blocks])
        found = all_to_all(sent, sizes, [each.numel() for each in blocks], group)
        self.received += (sum(sizes) - sizes[me]) * found.element_size()
        return found.view([len(part) for part in wanted[me]])  # rows come in the order of ranks


def inference_shard(model: ModelSpec, name: str, weight: Tensor, tp: int, rank: int) -> Tensor:
    """A rank's shard of a whole weight of the network; buffers are whole on every rank."""
    found = components.by_inside_name(model).get(inside(name))
    return weight if found is None else block(weight, found.inference_part(tp, rank))


def described_weights(spec: RunSpec) -> dict[str, Weight]:
    """By name within a block, or within the network; adapters too."""
    adapters = block_adapter_weights(spec.model, spec.lora, spec.adapters)
    return {**components.by_inside_name(spec.model), **{weight.name: weight for weight in adapters}}


def inside(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def block(weight: Tensor, part: Sequence[range]) -> Tensor:
    return weight[tuple(slice(each.start, each.stop) for each in part)]


def shifted(rows: range, held: range) -> range:
    """Rows of a weight by their place among those that are held."""
    return range(rows.start - held.start, rows.stop - held.start) if rows else range(0)
