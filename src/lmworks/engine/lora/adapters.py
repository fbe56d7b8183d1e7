"""LoRA adapters beside the weights: several at once in one batch.

All adapters of a layer are in one pair of matrices, as wide as the sum of their ranks, and room for more. Every row of
the batch is multiplied by all of them, and the columns of other adapters are masked:

    y = W·x + B·mask(A·x)        A (Σ rank, in), B (out, Σ rank)

Masked by assignment, not by multiplication with 0: an overflow in one adapter does not reach other sequences. These are
two GEMMs of fixed shape for any batch, so a CUDA graph can capture them; ranks are small, and so is the overhead. Where
layers were merged (q, k and v; gate and up), B is block diagonal.

With tensor parallelism a rank has its rows of B, or its columns of A, whose product is part of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...model import GPT
from ...spec import LMWorksError, SpecError, components
from ..core.fusion import FusedAttention, FusedBlock, FusedMLP, LinearMethod
from ..core.scheduler import Step
from ..core.step_input import Layout
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


@dataclass(frozen=True)
class Slot:
    """Where a loaded adapter is: its row of the table of masks, and its first column."""

    adapter: Adapter
    row: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.adapter.rank


class Adapters:
    """The adapters of an engine, each in columns of its own. One that fits in free columns is written there; else all
    are stacked again. Removed ones leave their columns free.
    """

    def __init__(self, model: GPT, tokens: int, shards: Mapping[str, LinearShard], slots: int = 0) -> None:
        """`model` is fused; `tokens` are those of the largest step; `shards`: of layers that ranks share, by name;
        `slots`: adapters for which there is room from the first one on.
        """
        self.model, self.tokens, self.shards, self.slots = model, tokens, shards, slots
        self.loaded: dict[str, Slot] = {}
        self.width = 0  # columns
        self.layers: list[tuple[LoRATarget, LoRALinear]] = []
        self.columns = torch.ones(1, 0, dtype=torch.bool)  # (1 + adapters, columns): `masked`, by a token's row

    def add(self, name: str, folder: Path) -> bool:
        """Whether layers have been replaced, and not only written."""
        if not name:
            raise SpecError("an adapter needs a name, by which requests ask for it")
        if name in self.loaded:
            raise SpecError(f"an adapter named {name!r} exists already; choose another name")
        adapter = read_adapter(name, folder, self.model.spec, self.weight.dtype)
        reachable = {part for target in lora_targets(self.model, self.shards) for part in target.parts}
        if missed := sorted(adapter.deltas.keys() - reachable):
            raise SpecError(f"{folder}: it changes {missed[0]}, and the engine applies adapters to plain layers only")
        adapter = local_shard(adapter, self.shards)
        # Never another adapter's later: ranks agree on rows also where some of them have stacked their adapters again.
        row = min({*range(1, len(self.loaded) + 2)}.difference(self.rows.values()))
        begin = self.room(adapter, row)
        try:
            if begin is not None:
                self.fill(name, Slot(adapter, row, begin))
            else:
                there = {other: (slot.adapter, slot.row) for other, slot in self.loaded.items()}
                self.stack({**there, name: (adapter, row)})
        except RuntimeError as error:  # out of memory, of several types
            raise LMWorksError(f"{folder}: the adapter does not fit the device ({error})") from None
        return begin is None

    def fill(self, name: str, slot: Slot) -> None:
        try:
            self.write(slot)
        except RuntimeError:
            self.erase(slot)
            raise
        self.loaded[name] = slot

    def remove(self, name: str) -> bool:
        """Whether layers have been replaced."""
        slot = self.loaded.pop(name)
        if not self.loaded:
            self.stack({})
            return True
        self.erase(slot)
        return False

    @property
    def weight(self) -> Tensor:
        """One whose device and precision those of all layers are."""
        return next(self.model.parameters())

    @property
    def rows(self) -> dict[str | None, int]:
        """Of the table of masks; None: of tokens without an adapter."""
        return {None: 0, **{name: slot.row for name, slot in self.loaded.items()}}

    def room(self, adapter: Adapter, row: int) -> int | None:
        """The first columns that are free side by side; None where there are none, or a layer has no adapters yet."""
        parts = {part for target, _ in self.layers for part in target.parts}
        if row >= len(self.columns) or not parts.issuperset(adapter.deltas):
            return None
        begin = 0
        for slot in sorted(self.loaded.values(), key=lambda slot: slot.begin):
            if begin + adapter.rank <= slot.begin:
                return begin
            begin = slot.end
        return begin if begin + adapter.rank <= self.width else None

    @torch.no_grad()
    def stack(self, adapters: Mapping[str, tuple[Adapter, int]]) -> None:
        """All anew, with their rows; on failure nothing changes."""
        device = self.weight.device
        spare = max(0, self.slots - len(adapters)) * max((adapter.rank for adapter, _ in adapters.values()), default=0)
        width = sum(adapter.rank for adapter, _ in adapters.values()) + spare
        rows = 1 + max([width, *(row for _, row in adapters.values())])  # no adapter has less than one column
        mask = AdapterMask(torch.ones(self.tokens, width, dtype=torch.bool, device=device))
        targets = lora_targets(self.model, self.shards)
        linears: list[nn.Module] = [target.base for target in targets]
        changed = []
        for at, target in enumerate(targets):
            found = [adapter.deltas.get(part) for adapter, _ in adapters.values() for part in target.parts]
            deltas = [delta for delta in found if delta is not None]
            if deltas:
                wide = len(target.parts) * width
                down = self.weight.new_zeros(wide, deltas[0].down.shape[1])
                up = self.weight.new_zeros(sum(target.parts.values()), wide)
                linears[at] = layer = LoRALinear(target.base, target.apply, mask, down, up)
                changed.append((target, layer))
        before = self.layers, self.width, self.columns, self.loaded
        self.layers, self.width, self.loaded = changed, width, {}
        self.columns = torch.ones(rows, width, dtype=torch.bool, device=device)
        try:
            begin = 0
            for name, (adapter, row) in adapters.items():
                self.write(slot := Slot(adapter, row, begin))
                self.loaded[name], begin = slot, slot.end
        except RuntimeError:
            self.layers, self.width, self.columns, self.loaded = before
            raise
        self.mask = mask
        for target, linear in zip(targets, linears, strict=True):
            setattr(target.owner, target.attribute, linear)

    @torch.no_grad()
    def write(self, slot: Slot) -> None:
        """Into columns that are free, of all layers."""
        for part, down, up in self.parts():
            if (delta := slot.adapter.deltas.get(part)) is not None:
                end = slot.begin + delta.down.shape[0]
                down[slot.begin : end].copy_(delta.down)
                up[:, slot.begin : end].copy_(delta.up)
        self.columns[slot.row, slot.begin : slot.end] = False

    @torch.no_grad()
    def erase(self, slot: Slot) -> None:
        """With zeros: what is masked is still multiplied, and a weight may be NaN."""
        self.columns[slot.row] = True
        for part, down, up in self.parts():
            if part in slot.adapter.deltas:
                down[slot.begin : slot.end] = 0
                up[:, slot.begin : slot.end] = 0

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Views of A (columns, in) and B (out, columns) of each weight of each layer that has adapters."""
        for target, layer in self.layers:
            row = 0
            for index, (part, rows) in enumerate(target.parts.items()):
                columns = slice(index * self.width, (index + 1) * self.width)
                yield part, layer.down[columns], layer.up[row : row + rows, columns]
                row += rows

    def adapter_indices(self, step: Step, bucket: Layout | None = None) -> np.ndarray:
        """The row of each token of a step, by its adapter; where a bucket pads its decodes, with rows for those."""
        rows, chunks = self.rows, step.chunks
        found = np.repeat([rows[chunk.sequence.params.adapter] for chunk in chunks], [chunk.count for chunk in chunks])
        if bucket is None or step.decode_only:
            return found
        single = sum(chunk.count == 1 for chunk in chunks)
        return np.insert(found, single, np.zeros(bucket.num_decodes - single, found.dtype))

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
        into = ("gate", "up") if spec.gated_mlp else ("up",)
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
