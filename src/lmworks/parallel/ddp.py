"""DistributedDataParallel: every rank holds the whole model; gradients are all-reduced in buckets during backward.

memory per rank      16ψ bytes (fp32 weights, gradients and two Adam moments of ψ parameters), 14ψ with bf16 weights
traffic per step     one all-reduce of 4ψ bytes (2ψ with precision.reduce = "bf16"), whatever the accumulation
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..model import GPT
from ..spec import RunSpec
from .mesh import Mesh
from .precision import DTYPES
from .single_rank import SingleRank


class DDP(SingleRank):
    """Not for expert parallelism, whose gradients are reduced in another group, nor for pipelines, whose split backward
    pass does not call DDP's hooks: ZeRO stage 0 does the same there.
    """

    def __init__(self, part: GPT, spec: RunSpec, mesh: Mesh, experts: set[str]) -> None:
        assert not experts, "DDP reduces every gradient in one group"
        super().__init__(part)
        self.loss_factor = float(mesh.size("dp_cp"))  # DDP averages over its group
        group = mesh.group("dp_cp")
        self.ddp = OrderedDDP(
            part,
            process_group=group,
            bucket_cap_mb=spec.parallel.bucket_mb,
            gradient_as_bucket_view=True,
            static_graph=spec.parallel.static_graph,
            init_sync=False,  # weights are equal already: they follow from the seed
        )
        if spec.precision.reduce != spec.precision.weights:  # gradients have the format of their weights
            reduce = DTYPES[spec.precision.reduce]
            self.ddp.register_comm_hook(None, lambda _, bucket: all_reduce_mean(reduce, bucket.buffer(), group))
        rebuild_buckets(self.ddp)
        # With a static graph the first backward pass is the one that DDP learns from, and it has to reduce: gradients
        # that are reduced already are equal on all ranks, and their mean in the next reduction leaves them as they are.
        self.learning = spec.parallel.static_graph
        self.each = spec.parallel.sync_each_pass  # the same mean leaves what is reduced already as it is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        reduce, self.learning = last or self.learning or self.each, False
        return nullcontext() if reduce else self.ddp.no_sync()


class OrderedDDP(DistributedDataParallel):
    """Fills its buckets in the order of the backward pass from the first step on.

    DDP learns that order in the first backward pass of a process and fills its buckets anew for the second. Where three
    ranks or more add up, the rounding of a sum depends on its place in the bucket, and the first step after a resume
    would not be to the last bit the step that it repeats. So the order is given, not learnt: last parameter first.
    """

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """What DDP does before its second step, with what it would have learnt in the first; ranks agree on it."""
    model.reducer._push_all_rebuilt_params()
    model.reducer._rebuild_buckets()


def all_reduce_mean(dtype: torch.dtype, buffer: Tensor, group: ProcessGroup) -> Future[Tensor]:
    """The mean over ranks, sent in another format. PyTorch's own hook does this for bf16, but refuses to on a CPU."""
    work = dist.all_reduce(buffer.to(dtype).div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda sent: buffer.copy_(sent.value()[0]))
