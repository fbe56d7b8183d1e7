"""LoRA adapters beside the weights: several at once in one batch.

All adapters of a layer are stacked into one pair of matrices, as wide as the sum of their ranks. Every row of the batch
is multiplied by all of them, and the columns of other adapters are masked:

    y = W·x + B·mask(A·x)        A (Σ rank, in), B (out, Σ rank)

Masked by assignment, not by multiplication with 0: an overflow in one adapter does not reach other sequences. These are
two GEMMs of fixed shape for any batch, so a CUDA graph can capture them; ranks are small, and so is the overhead. Where
layers were merged (q, k and v; gate and up), B is block diagonal.

With tensor parallelism a rank has its rows of B, or its columns of A, whose product is part of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...model import GPT
from ...spec import LMWorksError, SpecError, components
from ..core.fusion import FusedAttention, FusedBlock, FusedMLP, LinearMethod
from ..core.scheduler import Chunk
from ..tensor_parallel.tp_shards import RowParallelLinear
from .peft_files import Adapter, read_adapter

if TYPE_CHECKING:
    from ..tensor_parallel.tp_shards import LinearShard


@dataclass
class AdapterMask:
    """Which columns each row of the batch masks: one tensor for all layers, at a fixed address."""

    masked_columns: Tensor  # (tokens of the largest step, Σ rank) bool: columns of other adapters


class LoRALinear(nn.Module):
    """A linear layer with stacked adapters."""

    def __init__(self, base: nn.Module, apply: LinearMethod, mask: AdapterMask, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.base, self.apply_linear, self.mask = base, apply, mask
        self.down, self.up = down, up  # (parts · Σ rank, in), (out, parts · Σ rank)

    def forward(self, x: Tensor) -> Tensor:  # (tokens, in)
        masked = self.mask.masked_columns[: x.shape[0]].unsqueeze(1)  # (tokens, 1, Σ rank)
        product = self.apply_linear.product
        narrow = product(x, self.down, None)
        narrow.unflatten(1, (-1, masked.shape[-1])).masked_fill_(masked, 0)  # in place saves a pass
        return self.apply_linear(self.base, x) + product(narrow, self.up, None)


@dataclass(frozen=True)
class LoRATarget:
    """A layer of the fused network that adapters apply to; `parts`: the weights it was merged from, and their rows."""

    owner: nn.Module
    attribute: str
    apply: LinearMethod
    parts: dict[str, int]

    @property
    def base(self) -> nn.Module:
        layer: nn.Module = getattr(self.owner, self.attribute)
        return layer.base if isinstance(layer, LoRALinear) else layer


class Adapters:
    """The adapters of an engine. Adding one restacks all of them."""

    def __init__(self, model: GPT, tokens: int, shards: Mapping[str, LinearShard]) -> None:
        """`model` is fused; `tokens` are those of the largest step; `shards`: of layers that ranks share, by name."""
        self.model, self.tokens, self.shards = model, tokens, shards
        self.adapters: dict[str, Adapter] = {}

    def add(self, name: str, folder: Path) -> None:
        if not name:
            raise SpecError("an adapter needs a name, by which requests ask for it")
        if name in self.adapters:
            raise SpecError(f"an adapter named {name!r} exists already; choose another name")
        adapter = read_adapter(name, folder, self.model.spec, next(self.model.parameters()).dtype)
        reachable = {part for target in lora_targets(self.model, self.shards) for part in target.parts}
        if missed := sorted(adapter.deltas.keys() - reachable):
            raise SpecError(f"{folder}: it changes {missed[0]}, and the engine applies adapters to plain layers only")
        try:
            self.stack({**self.adapters, name: local_shard(adapter, self.shards)})
        except RuntimeError as error:  # out of memory, of several types
            raise LMWorksError(f"{folder}: the adapter does not fit the device ({error})") from None

    def remove(self, name: str) -> None:
        self.stack({other: adapter for other, adapter in self.adapters.items() if other != name})

    @torch.no_grad()
    def stack(self, adapters: dict[str, Adapter]) -> None:
        """Replace the stacked adapters; on failure nothing changes."""
        weight = next(self.model.parameters())  # whose device and precision those of all layers are
        width = sum(adapter.rank for adapter in adapters.values())
        columns = torch.ones(1 + len(adapters), width, dtype=torch.bool)
        indices: dict[str | None, int] = {None: 0}
        begin = 0
        for index, (name, adapter) in enumerate(adapters.items(), start=1):
            indices[name] = index
            columns[index, begin : begin + adapter.rank] = False
            begin += adapter.rank
        mask = AdapterMask(torch.ones(self.tokens, width, dtype=torch.bool, device=weight.device))
        targets = lora_targets(self.model, self.shards)
        layers = [target.base for target in targets]
        for at, target in enumerate(targets):
            if any(part in adapter.deltas for adapter in adapters.values() for part in target.parts):
                down, up = (matrix.to(weight) for matrix in stack_deltas(list(adapters.values()), target.parts, width))
                layers[at] = LoRALinear(target.base, target.apply, mask, down, up)
        self.columns = columns.to(weight.device)  # (1 + adapters, Σ rank): `masked`, by the index of a row's adapter
        self.adapters, self.indices, self.mask = adapters, indices, mask
        for target, layer in zip(targets, layers, strict=True):
            setattr(target.owner, target.attribute, layer)

    def adapter_indices(self, chunks: list[Chunk]) -> np.ndarray:
        """The adapter index of each token of a step."""
        indices = [self.indices[chunk.sequence.params.adapter] for chunk in chunks]
        return np.repeat(indices, [chunk.count for chunk in chunks])

    def set_adapter_indices(self, indices: np.ndarray) -> None:
        """Set the mask for the next forward pass, asynchronously."""
        index = torch.from_numpy(indices)
        if self.columns.is_cuda:
            index = index.pin_memory()
        index = index.to(self.columns.device, non_blocking=True)
        torch.index_select(self.columns, 0, index, out=self.mask.masked_columns[: len(index)])


def local_shard(adapter: Adapter, shards: Mapping[str, LinearShard]) -> Adapter:
    """This rank's shard of an adapter."""
    deltas = {
        name: shards[layer].delta(delta) if (layer := name.removesuffix(".weight")) in shards else delta
        for name, delta in adapter.deltas.items()
    }
    return Adapter(adapter.name, deltas)


def lora_targets(model: GPT, shards: Mapping[str, LinearShard]) -> list[LoRATarget]:
    """Every layer that adapters can apply to."""
    spec, targets = model.spec, []
    rows = {linear.name: linear.outputs for linear in components.linears(spec)}
    for layer, block in model.blocks.items():
        assert isinstance(block, FusedBlock)
        into = ("gate", "up") if spec.mlp == "swiglu" else ("up",)
        merged = [
            ("attention", "qkv", ("q", "k", "v")),
            ("attention", "out", ("out",)),
            ("mlp", "into", into),
            ("mlp", "down", ("down",)),
        ]
        for part, attribute, names in merged:
            owner = getattr(block, part)
            if isinstance(owner, FusedAttention | FusedMLP):
                parts = {}
                for name in names:
                    whole, outputs = f"blocks.{layer}.{part}.{name}", rows[f"{part}.{name}"]
                    parts[f"{whole}.weight"] = shards[whole].outputs(outputs) if whole in shards else outputs
                linear: nn.Module = getattr(owner, attribute)
                summed = isinstance(linear, RowParallelLinear)  # row-parallel: adapters apply before the all-reduce
                targets.append(
                    LoRATarget(linear if summed else owner, "part" if summed else attribute, owner.apply_linear, parts)
                )
    return targets


def stack_deltas(adapters: list[Adapter], parts: dict[str, int], width: int) -> tuple[Tensor, Tensor]:
    """A (parts · Σ rank, in) and B (out, parts · Σ rank) of a layer that was merged from `parts`."""
    inputs = next(a.deltas[part].down.shape[1] for a in adapters for part in parts if part in a.deltas)
    down, up = torch.zeros(len(parts) * width, inputs), torch.zeros(sum(parts.values()), len(parts) * width)
    column = row = 0
    for part, rows in parts.items():
        for adapter in adapters:
            if (delta := adapter.deltas.get(part)) is not None:
                rank = delta.down.shape[0]
                down[column : column + rank] = delta.down
                up[row : row + rows, column : column + rank] = delta.up
            column += adapter.rank
        row += rows
    return down, up
