"""The recipe: how a model is parallelized, in the order of `parallelize`.

    pipeline split → adapters → weight format → tensor, sequence, expert parallel → quantized base, fp8
      → activation checkpointing and offload → compile → autocast → weights → data parallel

Every part is built on the meta device and sharded before it has memory, so no rank holds more than its share. FSDP2
shards weights too, so it comes before them; the other strategies wrap a part that has its weights. Context parallelism
splits batches, not the model: `ParallelModel.inputs` does it for each micro-batch.

Without a mesh there is one process. What only a mesh needs is imported where it is used, because PyTorch's distributed
parts take seconds to import.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..model import GPT
from ..model.activation_checkpointing import SELECTIVE_POLICIES, checkpointed_forward
from ..model.activation_offload import Offload
from ..model.gpt import Block, LayerNorm
from ..model.lora import ActiveAdapter, add_adapters, add_scalar_adapter
from ..model.quantized_weight import quantize_base
from ..model.training_fusion import fuse_gelu_epilogues
from ..plan.activation_offload import block_budgets
from ..plan.pipelines.stages import Stage, stages_of_rank
from ..plan.policies import policies
from ..spec import RunSpec
from ..spec.layout import SPLIT_BACKWARD
from ..spec.lora import ScalarAdapter
from .data_parallel import DataParallel
from .ddp import DDP
from .expert_parallel import apply_expert_parallel, expert_names, sum_balance_loss_over_cp
from .initial_weights import Source, materialise
from .mesh import Mesh
from .optimizer_offload import HostOptimizer
from .parallel_model import ParallelModel
from .precision import apply_float8, autocast_forward, cast_weights
from .sharding_plan import ShardingPlan
from .single_rank import SingleRank
from .tensor_parallel import apply_tensor_parallel
from .zero import Zero


def parallelize(
    spec: RunSpec,
    mesh: Mesh | None,
    device: torch.device,
    weights: Source,
    stages: list[Stage] | None = None,
    frozen: bool = False,
    scalar_adapters: Sequence[ScalarAdapter] = (),
) -> ParallelModel:
    """This rank's part of the model, ready for its first step; `stages` replace those of its pipeline rank.

    `frozen`: a model that is only evaluated (a reference, a reward model). Its weights are sharded like those of the
    policy under tensor and expert parallelism and FSDP2, and whole on every rank under DDP and ZeRO 1 and 2; it has no
    gradient buffers. `scalar_adapters`: a critic or a reward model over the same base (`adapter_model.py`).
    """
    sharding = ShardingPlan()
    parts: dict[int, GPT] = {}
    strategies: dict[int, DataParallel] = {}
    active = ActiveAdapter(spec.adapters[0]) if spec.adapters else None  # of all stages of this rank
    several = any(adapter.trained for adapter in scalar_adapters)
    own = spec.adapters[0] if several else ""  # what this model updates of the network
    for stage in stages or stages_of_rank(spec, mesh.rank("pp") if mesh else 0):
        with torch.device("meta"):
            part = GPT(spec.model, layers=stage.layers, first=stage.first, last=stage.last)
        if active is not None:
            add_adapters(part, spec.lora, spec.adapters, active)
            for adapter in scalar_adapters:
                add_scalar_adapter(part, adapter)
        cast_weights(spec.precision, part)
        experts: set[str] = set()
        if mesh is not None:
            if mesh.size("tp") > 1:
                apply_tensor_parallel(part, spec.parallel, mesh, sharding)
            if mesh.size("ep") > 1:
                apply_expert_parallel(part, mesh, sharding)
                experts = expert_names(part)
            if mesh.size("cp") > 1:
                sum_balance_loss_over_cp(part, mesh.group("cp"))
        if spec.lora.base:
            quantize_base(part, spec.lora.base)
        if spec.precision.dtype == "fp8":
            apply_float8(part, spec, device)
        if not frozen:
            apply_activation_checkpointing(part, spec, device)
        fuse_gelu_epilogues(gelu_blocks(part, spec))
        if not frozen:
            apply_activation_offload(part, spec)
        if spec.parallel.compile:
            compile_blocks(part, spec, mesh)
        if spec.parallel.engine == "native":
            autocast_forward(spec.precision, part, device)
        strategies[stage.index] = apply_data_parallel(part, spec, mesh, experts, sharding, device, weights, frozen, own)
        parts[stage.index] = part
    pipeline = None
    if mesh is not None and mesh.size("pp") > 1:
        from .pipeline import Pipeline

        pipeline = Pipeline(dict(parts), spec, mesh, device)
    return ParallelModel(spec, mesh, device, sharding, parts, strategies, pipeline)


def gelu_blocks(part: GPT, spec: RunSpec) -> list[Block]:
    """Blocks whose GELU can be an epilogue: plain linear layers, and no activation checkpointing inside of the MLP.

    A schedule that splits the backward pass would compute both gradients of such a product twice.
    """
    layout = spec.parallel
    plain = spec.model.mlp == "gelu" and not spec.model.experts and layout.tp == 1 and spec.precision.dtype != "fp8"
    if (
        not plain
        or spec.model.norm_placement != "pre"
        or spec.model.residual_scale != 1
        or spec.adapters
        or (layout.pp > 1 and layout.schedule in SPLIT_BACKWARD)
    ):
        return []
    return [block for block in part.layers() if block.recompute not in SELECTIVE_POLICIES]


def compile_blocks(part: GPT, spec: RunSpec, mesh: Mesh | None) -> None:
    """A block at a time: all blocks share one compiled graph, and collectives around them stay where they are."""
    without_collectives = mesh is None or mesh.size("tp") * mesh.size("cp") * mesh.size("ep") == 1
    if isinstance(part.norm, LayerNorm) and without_collectives:  # RMSNorm has kernels of its own
        part.norm.compile()
    for block in part.layers():
        if block.recompute in SELECTIVE_POLICIES and without_collectives:  # otherwise a block is not one graph
            block.forward = checkpointed_forward(block, block.recompute)  # type: ignore[method-assign]
            block.recompute = "none"
        block.compile()


def apply_data_parallel(
    part: GPT,
    spec: RunSpec,
    mesh: Mesh | None,
    experts: set[str],
    sharding: ShardingPlan,
    device: torch.device,
    weights: Source,
    frozen: bool,
    adapter: str,
) -> DataParallel:
    """Give a part its weights, and wrap it in its data-parallel strategy."""
    layout = spec.parallel
    fsdp2 = layout.strategy == "fsdp2" or (layout.strategy == "zero" and layout.zero == 3)
    master = spec.precision.weights == "bf16" and spec.precision.master and not frozen
    strategy: DataParallel
    if mesh is not None and fsdp2 and layout.engine == "native" and not has_no_replicas(spec, mesh):
        from .fsdp2 import FSDP2

        strategy = FSDP2(part, spec, mesh, experts, adapter)  # before the part has memory
        weight_device = torch.device("cpu") if layout.offload == "full" else device
        materialise(part, sharding, mesh, device, weights, weight_device, master)
    else:
        materialise(part, sharding, mesh, device, weights, device, master)
        strategy = SingleRank(part) if frozen else wrap_data_parallel(part, spec, mesh, experts, adapter)
    return HostOptimizer(strategy) if layout.offload == "optimizer" and not frozen else strategy


def wrap_data_parallel(
    part: GPT, spec: RunSpec, mesh: Mesh | None, experts: set[str], adapter: str = ""
) -> DataParallel:
    """`adapter`: the one whose weights are updated, where several are trained."""
    layout = spec.parallel
    if mesh is None or has_no_replicas(spec, mesh) or layout.engine == "deepspeed":  # DeepSpeed wraps the part later
        return SingleRank(part, adapter)
    if layout.strategy == "fsdp1":
        from .fsdp1 import FSDP1

        return FSDP1(part, spec, mesh, experts)
    if layout.strategy == "zero":
        return Zero(part, spec, mesh, experts, layout.zero, adapter)
    if layout.pp > 1 or layout.ep > 1 or adapter:
        # PyTorch's DDP loses its reduction in a split backward pass, knows one group for all gradients, and waits for
        # those of weights that a pass does not use.
        return Zero(part, spec, mesh, experts, 0, adapter)
    return DDP(part, spec, mesh, experts)


def has_no_replicas(spec: RunSpec, mesh: Mesh) -> bool:
    """A data-parallel group of one rank: there is nothing to shard or to reduce, whatever the strategy.

    On one GPU the hooks of FSDP2 would cost their host more than a small model takes (docs/parallelism.md).
    """
    return mesh.size("dp_cp") == 1 and spec.parallel.offload != "full"


def apply_activation_checkpointing(part: GPT, spec: RunSpec, device: torch.device) -> None:
    blocks = part.layers()
    chosen = policies(with_device(spec, device), [block.attention.layer for block in blocks])
    for block, policy in zip(blocks, chosen, strict=True):
        block.recompute = policy


def apply_activation_offload(part: GPT, spec: RunSpec) -> None:
    if spec.parallel.offload_activations:
        blocks = part.layers()
        part.offload = Offload(block_budgets(spec, len(blocks)), blocks[0].parameters())


def with_device(spec: RunSpec, device: torch.device) -> RunSpec:
    """With `cluster.device` resolved: what blocks save depends on the kernels of the device."""
    return spec.replace(cluster=spec.cluster.replace(device=device.type)) if spec.cluster.device == "auto" else spec
