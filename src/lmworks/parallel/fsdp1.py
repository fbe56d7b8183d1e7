"""FSDP1 (`FullyShardedDataParallel`): the wrapper that FSDP2 replaces, for those who migrate from it.

    dp_shard > 1, reshard = true         FULL_SHARD       weights, gradients and states sharded
    dp_shard > 1, reshard = false        SHARD_GRAD_OP    weights stay whole from forward to backward
    dp_replicate and dp_shard > 1        HYBRID_SHARD (or its SHARD_GRAD_OP form): shards inside, copies outside
    dp_shard = 1                         NO_SHARD         as DDP

A block's weights become one flat parameter, cut into n equal pieces wherever that falls. So a rank owns a run of
elements of some weights and nothing of others: `Shard.rows` is "flat", and the leaves of the ranks of "shard", joined
in their order, are the flattened weight. With NO_SHARD every leaf is whole and `rows` is None.

While gradients accumulate they stay in the compute precision (FSDP2 and ZeRO accumulate in fp32): bf16 loses bits here.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from ..model import GPT
from ..model.gpt import Block
from ..spec import ParallelSpec, RunSpec
from .data_parallel import Shard, unwrapped
from .fsdp2 import compute_dtype, reduce_dtype
from .mesh import Mesh


class FSDP1:
    """Over a part that has its memory and weights; not for pipelines or expert parallelism."""

    def __init__(self, part: GPT, spec: RunSpec, mesh: Mesh, experts: set[str]) -> None:
        assert not experts, "FSDP1 reduces every gradient in one group"
        shapes = {name: parameter.shape for name, parameter in part.named_parameters()}
        self.loss_factor = float(mesh.size("dp_cp"))  # FSDP1 averages over all its ranks
        kind, group = strategy_of(spec.parallel, mesh)
        cuda = mesh.device_type == "cuda"
        reduce = reduce_dtype(spec.precision)
        # The residual stream stays fp32.
        uncast: dict[str, Any] = {"cast_forward_inputs": False, "cast_root_forward_inputs": False}
        low = MixedPrecision(param_dtype=compute_dtype(spec.precision), reduce_dtype=reduce, **uncast)
        wide = MixedPrecision(reduce_dtype=reduce, **uncast)  # embedding, last norm and head: see fsdp2.py
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that FSDP2 replaces it
            self.fsdp = FullyShardedDataParallel(
                part,
                process_group=group,
                sharding_strategy=kind,
                auto_wrap_policy=CustomPolicy(lambda m: {"mixed_precision": low} if isinstance(m, Block) else False),
                mixed_precision=wide,
                device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
                use_orig_params=True,
                forward_prefetch=True,
            )
        rows = None if kind == ShardingStrategy.NO_SHARD else "flat"
        named = {unwrapped(name): p for name, p in self.fsdp.named_parameters()}
        self.shard_list = [Shard(name, parameter, shapes[name], rows) for name, parameter in named.items()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fsdp(*args, **kwargs)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.fsdp.no_sync()

    def finish(self) -> None:
        """Nothing: after the last backward pass FSDP1 has put its shard of the gradient on the parameters."""

    def shards(self) -> list[Shard]:
        return self.shard_list

    def after_step(self) -> None:
        pass

    def zero_grad(self) -> None:
        self.fsdp.zero_grad(set_to_none=True)


def strategy_of(
    layout: ParallelSpec, mesh: Mesh
) -> tuple[ShardingStrategy, ProcessGroup | tuple[ProcessGroup, ProcessGroup]]:
    """The sharding strategy that a layout names, with the ranks it works on: shards first, then copies."""
    if layout.dp_shard == 1:
        return ShardingStrategy.NO_SHARD, mesh.group("dp_cp")
    if layout.dp_replicate > 1:
        kind = ShardingStrategy.HYBRID_SHARD if layout.reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
        return kind, (mesh.group("shard"), mesh.group("dp_replicate"))
    kind = ShardingStrategy.FULL_SHARD if layout.reshard else ShardingStrategy.SHARD_GRAD_OP
    return kind, mesh.group("shard")
