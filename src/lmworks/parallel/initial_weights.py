"""Initial weights: where they come from, and the share of each that a rank holds.

A source is a function from a weight's name and whole shape to its whole value, on the CPU. Each rank asks for one
weight at a time and keeps its share, so every layout starts from the same numbers and no rank holds the model twice.
A source is a seed, or a Hugging Face folder; a run folder's checkpoint is loaded later, straight into shards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.training.adamw import split
from ..model.gpt import initial_weight
from ..model.hf import HFWeights, changes, read_config
from ..model.lora import initial_adapter, split_adapter_name
from ..model.peft import read_peft
from ..model.quantized_weight import QuantizedWeight, rounded
from ..spec import RunSpec, SpecError, components
from ..spec.components import SCORE
from ..spec.lora import DEFAULT_ADAPTER
from .mesh import Mesh
from .sharding_plan import ShardingPlan

Source = Callable[[str, torch.Size], Tensor]


def source_of(spec: RunSpec, base: Source | None = None) -> Source:
    """The seed's, unless checkpoint.init names a Hugging Face folder; with adapters, theirs, over `base`."""
    base = base or base_source(spec)
    return with_adapters(spec, base) if spec.adapters else base


def base_source(spec: RunSpec) -> Source:
    start = Path(spec.checkpoint.init) if spec.checkpoint.init else None

    def drawn(name: str, shape: torch.Size) -> Tensor:
        return initial_weight(spec.model, spec.seed, name, shape)

    if start is None or not is_hf(start):
        return drawn
    there = read_config(start)[1]
    if not spec.model.scalar_head or there.scalar_head:
        return HFWeights(start, spec.model).weight
    # A reward model or critic begins as a language model, with a new head.
    language_model = spec.model.replace(scalar_head=False, tie_embeddings=there.tie_embeddings)
    body = HFWeights(start, language_model).weight
    return lambda name, shape: drawn(name, shape) if name == SCORE else body(name, shape)


def changed_keys(spec: RunSpec) -> str:
    """What to say of keys by which the run computes something else than the Hugging Face model that it starts from."""
    start = Path(spec.checkpoint.init) if spec.checkpoint.init else None
    if start is None or not is_hf(start):
        return ""
    there = read_config(start)[1]
    found = ", ".join(
        f"model.{key} = {getattr(spec.model, key)}, not {getattr(there, key)}" for key in changes(there, spec.model)
    )
    return found and f"checkpoint.init = '{start}' was made with other keys: the run has {found}"


def with_adapters(spec: RunSpec, base: Source) -> Source:
    """The weights of `base`, and adapters as they start: random and zero, or those of lora.init."""
    given = read_peft(Path(spec.lora.init), spec.model) if spec.lora.init else None
    if given is not None:
        given.check(spec.model, spec.lora)

    def weight(name: str, shape: torch.Size) -> Tensor:
        place = split_adapter_name(name)
        if place is None:
            if given is not None and given.score is not None and name == SCORE:
                return given.score
            return base(name, shape)
        if given is not None and place[1] == DEFAULT_ADAPTER:
            return given.weight(name)
        described = components.find(spec.model, f"{place[0]}.weight")

        def frozen() -> Tensor:
            return as_stored(spec, described, base(f"{place[0]}.weight", torch.Size(described.shape)))

        return initial_adapter(spec.seed, name, shape, frozen)

    return weight


def as_stored(spec: RunSpec, described: components.Weight, weight: Tensor) -> Tensor:
    """A weight of the base as the run's layers have it: rounded by lora.base."""
    linears = {f"{linear.name}.weight" for linear in components.linears(spec.model)}
    if not spec.lora.base or described.name not in linears:
        return weight
    return rounded(described, weight, spec.lora.base)


def is_hf(folder: Path) -> bool:
    if not folder.is_dir():
        raise SpecError(f"checkpoint.init = {str(folder)!r}: there is no such folder")
    return (folder / "config.json").is_file() and not (folder / "spec.toml").exists()


@torch.no_grad()
def materialise(
    part: nn.Module,
    sharding: ShardingPlan,
    mesh: Mesh | None,
    device: torch.device,
    weights: Source,
    weight_device: torch.device,
    master: bool = False,
) -> None:
    """Give a part memory (weights on `weight_device`, buffers on `device`), and each weight its share of the whole.

    With `master` what bf16 cuts off each weight that is trained is kept for its optimizer.
    """
    part.to_empty(device=weight_device)

    def share_of(name: str, local: torch.Size) -> Tensor:
        whole = weights(name, sharding.shape(name, local))
        return sharding.local_part(name, whole, mesh) if mesh is not None else whole

    quantized = {name: module for name, module in part.named_modules() if isinstance(module, QuantizedWeight)}
    for name, stored in quantized.items():
        weight = share_of(f"{name.rpartition('.')[0]}.weight", stored.shape).to(weight_device)
        for key, value in stored.encode(weight).items():
            held = getattr(stored, key)
            local_rows(held).copy_(fsdp_shard(held, value))
    for name, parameter in part.named_parameters():
        if name.rpartition(".")[0] in quantized:
            continue
        own = fsdp_shard(parameter, share_of(name, parameter.shape))
        if master and parameter.requires_grad:
            own, low = split(own.float().to(weight_device))
            parameter.low_bits = low  # type: ignore[attr-defined]  # until an optimizer takes it: data_parallel.take_low_bits
        local_rows(parameter).copy_(own)
    for path, module in part.named_modules():
        for name, buffer in module.named_buffers(recurse=False):  # the choice bias of experts
            value = weights(f"{path}.{name}", buffer.shape).to(device, torch.float32)
            setattr(module, name, value.clone())


def local_rows(parameter: Tensor) -> Tensor:
    return parameter.to_local() if is_sharded(parameter) else parameter  # type: ignore[attr-defined]


def fsdp_shard(parameter: Any, share: Tensor) -> Tensor:
    """What FSDP2 leaves to this rank of a weight."""
    if not is_sharded(parameter):
        return share
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            count, rank = parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim)
            chunks = share.chunk(count, placement.dim)
            share = chunks[rank] if rank < len(chunks) else share[:0]
    return share


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor, which FSDP2 makes of a weight."""
    return hasattr(parameter, "placements")
