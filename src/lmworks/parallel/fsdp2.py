"""FSDP2 (`fully_shard`): parameters, gradients and optimizer states are sharded; a block is gathered while it runs.

    memory per rank      16ψ/n bytes, and the gathered weights of the blocks at work
    traffic per step     all-gather in every forward pass and, with reshard, again in every backward pass (ψ each),
                         reduce-scatter of the gradients after the last

Rows (dim 0) of each weight are cut over "shard" = dp_shard × cp; with dp_replicate > 1 (HSDP) shards are also
all-reduced over the copies. Expert weights are cut over "edp", the ranks that hold the same experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..model import GPT
from ..spec import PrecisionSpec, RunSpec
from .data_parallel import Shard, take_low_bits, trained_parameters
from .mesh import Mesh


def compute_dtype(precision: PrecisionSpec) -> torch.dtype | None:
    """What gathered weights of blocks are cast to; None: they stay fp32."""
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.compute]


def reduce_dtype(precision: PrecisionSpec) -> torch.dtype:
    return torch.bfloat16 if precision.reduce == "bf16" else torch.float32


class FSDP2:
    """May be put over a part on the meta device; its shards exist once the part has memory and weights."""

    loss_factor = 1.0  # gradients are summed

    def __init__(self, part: GPT, spec: RunSpec, mesh: Mesh, experts: set[str], adapter: str = "") -> None:
        self.part, self.experts, self.each = part, experts, spec.parallel.sync_each_pass
        layout = spec.parallel
        reduce = reduce_dtype(spec.precision)
        # Inputs are not cast: the residual stream stays as it starts, as it does under autocast on one rank.
        low = MixedPrecisionPolicy(compute_dtype(spec.precision), reduce, cast_forward_inputs=False)
        # Embedding, last norm and head are not cast. The stream starts as an embedding, and the loss sums the
        # head's gradient chunk by chunk: where they are fp32, both would lose more to bf16 than a matrix product does.
        wide = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(mesh.device_type == "cuda") if layout.offload == "full" else OffloadPolicy()
        dense, sparse = data_mesh(mesh, "shard"), data_mesh(mesh, "edp") if experts else None
        options: dict[str, Any] = {"offload_policy": offload, "reshard_after_forward": layout.reshard}
        for block in part.layers():
            for module, children in holders(block, experts, part):
                for child in children:  # else they would be gathered with the experts, over the wrong ranks
                    fully_shard(child, mesh=dense, mp_policy=low, **options)
                fully_shard(module, mesh=sparse, mp_policy=low, **options)
            fully_shard(block, mesh=dense, mp_policy=low, **options)
        # The root's weights are used last in the forward pass and first in the backward pass: no reason to reshard.
        fully_shard(part, mesh=dense, mp_policy=wide, offload_policy=offload, reshard_after_forward=False)
        self.root = cast(FSDPModule, part)
        self.units = [module for module in part.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # else a factor of 1 asks for an operation only NCCL has
        self.prefetch(layout.prefetch)
        self.adapter = adapter  # whose weights are the shards; empty: all that are trained
        self.shard_list: list[Shard] = []
        self.sharded: list[DTensor] = []  # the parameter behind each of them

    def of_adapter(self, adapter: str) -> FSDP2:
        """The same units, with the shards of another adapter."""
        other = copy.copy(self)
        other.adapter, other.shard_list, other.sharded = adapter, [], []
        return other

    def prefetch(self, ahead: int) -> None:
        """Gather the next `ahead` blocks while one runs."""
        blocks = self.part.layers()
        inside = [[unit for unit in block.modules() if isinstance(unit, FSDPModule)] for block in blocks]
        for i, block in enumerate(cast("list[FSDPModule]", blocks)):
            block.set_modules_to_forward_prefetch([*chain(*inside[i + 1 : i + 1 + ahead])])
            block.set_modules_to_backward_prefetch([*chain(*reversed(inside[max(0, i - ahead) : i]))])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.part(*args, **kwargs)
        if not torch.is_grad_enabled():  # no backward pass will do it, and gathered weights would grow stale
            self.reshard(root=not kwargs.get("final_states"))
        return result

    def reshard(self, root: bool = True) -> None:
        """Without `root` the head stays: a teacher's, until the student's loss is computed."""
        for unit in self.units:
            if root or unit is not self.root:
                unit.reshard()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.root.set_requires_gradient_sync(last or self.each)
        yield

    def finish(self) -> None:
        for shard, parameter in zip(self.shards(), self.sharded, strict=True):
            shard.leaf.grad = None if parameter.grad is None else local(parameter.grad)

    def shards(self) -> list[Shard]:
        """A rank past the last row of a small weight has an empty leaf."""
        if not self.shard_list:
            self.reshard()
            for name, parameter in trained_parameters(self.part, self.adapter).items():  # others are sharded, too
                assert isinstance(parameter, DTensor)
                leaf, rows = nn.Parameter(local(parameter)), "edp" if name in self.experts else "shard"
                self.shard_list.append(Shard(name, leaf, parameter.shape, rows, take_low_bits(parameter)))
                self.sharded.append(parameter)
        return self.shard_list

    def after_step(self) -> None:
        self.reshard()

    def zero_grad(self) -> None:
        for shard, parameter in zip(self.shards(), self.sharded, strict=True):
            shard.leaf.grad = parameter.grad = None


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, as a plain tensor that shares their memory."""
    return cast(DTensor, tensor.detach()).to_local()


def data_mesh(mesh: Mesh, rows: str) -> DeviceMesh:
    """1-D: shards. 2-D: copies × shards (HSDP); copies are already a part of edp where dp_shard = 1."""
    copies = mesh.size("dp_replicate") > 1 and not (rows == "edp" and mesh.grid.experts_over == "dp_cp")
    return mesh.device_mesh("dp_replicate", rows) if copies else mesh.device_mesh(rows)


def holders(block: nn.Module, experts: set[str], part: nn.Module) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Modules that hold expert weights themselves, each with its children that hold other ones."""
    names = {id(parameter): name for name, parameter in part.named_parameters()}
    found = []
    for module in block.modules():
        own = [names[id(parameter)] for parameter in module.parameters(recurse=False)]
        if any(name in experts for name in own):
            assert all(name in experts for name in own), f"{own} are not all experts"
            found.append((module, [child for child in module.children() if any(True for _ in child.parameters())]))
    return found
