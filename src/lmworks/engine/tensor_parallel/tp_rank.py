"""What every rank of a tensor-parallel engine does, whoever starts it: its shard of the weights, its collectives.

Rank 0 schedules, packs and samples. Before a step it sends a `StepMessage` to the others, which run the same layers on
their shards (`tp_worker.py`); then it broadcasts the sampled tokens. Ranks are processes that serve (`executor.py`), or
those of a trainer (`rank_group.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...model.gpt import GPT
from ...parallel.collectives import all_gather
from ...parallel.collectives import all_reduce as reduce_over_group
from ...parallel.initial_weights import Source, materialise
from ...parallel.mesh import Mesh
from ...parallel.sharding_plan import ShardingPlan
from ...parallel.tensor_parallel import apply_tensor_parallel
from ...parallel.tensor_parallel import local_heads as heads_of_rank
from ...spec import ModelSpec, ParallelSpec
from ..core.scheduler import Step
from ..core.step_input import Layout
from ..core.step_output import PromptLogprobsQuery
from ..quantization.quantized_model import MetaModel, QuantLinear
from .tp_shards import (
    LinearShard,
    attach_quantized_shards,
    check_tp_divides,
    detach_linears,
    linear_shards,
    make_plain,
)


class StepMessage(NamedTuple):
    """A step, as it is sent to workers."""

    copies: list[tuple[int, int]]
    buffer: np.ndarray
    layout: Layout
    prompt_queries: list[int]  # positions whose logits rank 0 needs for log-probabilities of prompts
    drafted: bool  # draft tokens are broadcast after this
    adapters: np.ndarray | None  # (tokens): the index of the adapter of each


class TensorParallelRank:
    """This process as one of the ranks of a tensor-parallel group, that of `mesh`."""

    workers_ready = False  # workers wait for steps; until then all ranks run the same code
    called_on_all_ranks = False  # sleep, wake and new weights: else rank 0 alone would be told of them

    def __init__(self, mesh: Mesh, device: torch.device, deterministic: bool = False) -> None:
        self.mesh, self.device, self.deterministic = mesh, device, deterministic
        self.group, self.rank, self.tp = mesh.group("tp"), mesh.rank("tp"), mesh.size("tp")
        self.root = dist.get_global_rank(self.group, 0)
        self.shards: dict[str, LinearShard] = {}  # by layer, once the model is sharded

    def load_shards(
        self,
        meta_model: MetaModel,
        dtype: torch.dtype,
        weights: Source,
        quantized: Callable[[str], QuantLinear] | None = None,  # unsharded quantized layers, by name
    ) -> GPT:
        """This rank's shard of a network; of each weight only the shard is kept."""
        check_tp_divides(meta_model, self.tp)
        sharding_plan = ShardingPlan()
        with torch.device("meta"):
            model = GPT(meta_model.spec).to(dtype)
        apply_tensor_parallel(model, ParallelSpec(tp=self.tp), self.mesh, sharding_plan)
        self.shards = linear_shards(model, sharding_plan, self.rank)
        taken = {} if quantized is None else detach_linears(model)
        materialise(model, sharding_plan, self.mesh, self.device, weights, self.device)
        if quantized is None:
            make_plain(model, self.all_reduce)
        else:
            attach_quantized_shards(model, taken, self.shards, quantized, self.all_reduce, self.device)
        return model.eval()

    def all_reduce(self, product: Tensor) -> Tensor:
        """Sum of all ranks' partial products.

        The order of a library's all-reduce may depend on the batch size. Where results must not depend on it, partial
        products are all-gathered and added in rank order on every rank.
        """
        if not self.deterministic:
            return reduce_over_group(product, self.group)
        return functools.reduce(torch.add, all_gather(product.unsqueeze(0), 0, self.group).unbind())

    def local_heads(self, spec: ModelSpec) -> slice:
        return heads_of_rank(spec, self.mesh)

    def gather_logits(self, project: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """All-gather the logits, of which each rank computes a range of the vocabulary."""
        return lambda states, weight: all_gather(project(states, weight), -1, self.group)

    def min_over_ranks(self, number: int) -> int:
        """All-reduce (min)."""
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, self.group)
        return int(least)

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks, in order."""
        found: list[Any] = [None] * self.tp
        dist.all_gather_object(found, value, self.group)
        return found

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Broadcast from rank 0, in place."""
        if self.workers_ready:
            dist.broadcast(numbers, src=self.root, group=self.group)
        return numbers

    def broadcast_step(
        self,
        step: Step,
        buffer: Tensor,
        layout: Layout,
        prompt_queries: list[PromptLogprobsQuery],
        drafted: bool,
        adapters: np.ndarray | None,
    ) -> None:
        """Send a step to the workers before it is run."""
        if self.workers_ready:
            places = [place for each in prompt_queries for place in range(each.at, each.at + each.count)]
            drafted = drafted and any(chunk.num_logits > 1 for chunk in step.chunks)
            self.send_to_workers(StepMessage(step.copies, buffer.numpy(), layout, places, drafted, adapters))

    def send_to_workers(self, message: Any) -> None:
        """Nothing to do on a worker."""

    def add_adapter(self, name: str, folder: Path) -> None:
        """Nothing to do on a worker."""

    def remove_adapter(self, name: str) -> None:
        """Nothing to do on a worker."""

    def root_cause(self, error: Exception) -> Exception:
        """A worker has no other cause."""
        return error

    def failed_worker(self) -> str:
        """Workers monitor no others."""
        return ""

    def close(self) -> None:
        """Nothing to do on a worker."""
