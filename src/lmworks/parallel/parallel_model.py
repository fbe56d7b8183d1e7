"""A parallelized model: what the training loop holds on each rank, whatever the layout.

`forward_backward` runs the micro-batches of a step, `finish` reduces every gradient, the optimizer updates the
leaves of `shards`, `after_step` brings the update to the model. Losses are sums over tokens; the caller divides by the
tokens of the global batch, so gradients are sums too, under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batch
from ..kernels.training.cross_entropy import IGNORE
from ..model import GPT
from ..model.attention import dense
from ..model.gpt import Linear, default_positions
from ..model.moe import moe_layers, set_balance_scale, update_balance
from ..model.quantized_weight import QuantizedWeight
from ..record import phase
from ..spec import RunSpec
from ..spec.layout import V_SHAPED
from .data_parallel import DataParallel, Shard, unwrapped
from .mesh import Mesh
from .precision import autocast_forward
from .sharding_plan import ShardingPlan
from .single_rank import SingleRank
from .state_dict import as_dtensor
from .tensor_parallel import local_heads

if TYPE_CHECKING:
    from .pipeline import Pipeline  # PyTorch's pipelining takes a second to import


LossOf = Callable[[Callable[..., Any], Batch], Tensor]
"""(forward, batch) → the loss of a micro-batch, a sum. `forward(batch, **options)` is `ParallelModel.forward`."""


class ParallelModel:
    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh | None,
        device: torch.device,
        sharding: ShardingPlan,
        parts: dict[int, GPT],  # this rank's pipeline stages; stage 0 is the whole model without a pipeline
        strategies: dict[int, DataParallel],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.spec, self.mesh, self.device, self.sharding = spec, mesh, device, sharding
        self.parts, self.strategies, self.pipeline = parts, strategies, pipeline
        self.tied = tied_group(spec, mesh)
        self.shard_list: list[Shard] | None = None

    @classmethod
    def from_model(cls, model: GPT, spec: RunSpec) -> ParallelModel:
        """A model that exists already, in one process."""
        autocast_forward(spec.precision, model, model.device)
        return cls(spec, None, model.device, ShardingPlan(), {0: model}, {0: SingleRank(model)})

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else self.mesh.size(axis)

    # --- a step -----------------------------------------------------------------------------------------

    def forward_backward(
        self, batches: Sequence[Batch], scale: float, loss_of: LossOf | None = None, balance_scale: float | None = None
    ) -> Tensor:
        """Run a step's micro-batches; gradients of scale · loss. Returns this rank's own share of the loss sum.

        Shares add up over the world: only the last stage has a loss, and tensor-parallel ranks have it in common.
        `loss_of` replaces next-token prediction; `balance_scale` is the factor of the balance loss of experts, which
        is a sum over tokens, where it is not that of the loss.
        """
        loss_factor = next(iter(self.strategies.values())).loss_factor
        factor = scale * loss_factor
        for part in self.parts.values():
            set_balance_scale(part, factor if balance_scale is None else balance_scale * loss_factor)
        if self.pipeline is not None:
            phase.enter("forward")  # and backward: stages alternate
            return self.pipeline.train([self.inputs(batch) for batch in batches], factor) / self.size("tp")
        loss_sum = torch.zeros((), device=self.device)
        strategy = self.strategies[0]
        for index, batch in enumerate(batches):
            with strategy.micro_batch(last=index == len(batches) - 1):
                phase.enter("forward")
                loss = (loss_of or next_token_loss)(self.forward, batch)
                phase.enter("backward")
                (loss * factor).backward()
            loss_sum += loss.detach()
        return loss_sum / self.size("tp")

    def forward(self, batch: Batch, **options: Any) -> Any:
        """The forward pass over this rank's share of a micro-batch; `options` of GPT.forward."""
        return self.strategies[0](**self.inputs(batch), **options)

    def finish(self) -> None:
        """After the last backward pass: every gradient is the sum over all that contributed to it."""
        for strategy in self.strategies.values():
            strategy.finish()
        if self.mesh is None:
            return
        partial = [shard for shard in self.shards if shard.name in self.sharding.partial_grads]
        for axis in sorted({self.sharding.partial_grads[shard.name] for shard in partial}):  # in one order on all ranks
            sum_gradients([s for s in partial if self.sharding.partial_grads[s.name] == axis], self.mesh.group(axis))
        self.sum_tied_gradients()

    def sum_tied_gradients(self) -> None:
        """A tied embedding is held by the first stage and by the last; each has a part of its gradient."""
        copies = [shard for shard in self.shards if shard.name == "embed.weight"]
        if self.tied is not None and copies:
            sum_gradients(copies, self.tied)
        elif len(copies) == 2 and copies[0].leaf.grad is not None and copies[1].leaf.grad is not None:
            copies[0].leaf.grad += copies[1].leaf.grad  # both stages stand on this rank
            copies[1].leaf.grad.copy_(copies[0].leaf.grad)

    @property
    def shards(self) -> list[Shard]:
        """What this rank's optimizer updates."""
        if self.shard_list is None:
            self.shard_list = [shard for strategy in self.strategies.values() for shard in strategy.shards()]
        return self.shard_list

    def names(self) -> list[str]:
        """Of all weights of this rank's parts, frozen ones too, in the order of `whole_weights`."""
        return [unwrapped(name) for part in self.parts.values() for name, _ in named_weights(part)]

    def whole_weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, or those of these names, made whole on all ranks, one at a time. Collective; no pipeline."""
        for name, held in named_weights(self.parts[0]):
            if names is None or name in names:
                yield name, self.gather(name, held, self.sharding)

    def gather(self, name: str, held: Tensor | QuantizedWeight, sharding: ShardingPlan) -> Tensor:
        """A weight of this rank made whole, as far as `sharding` says that it is cut; a quantized one in fp32."""
        weight: Tensor = held.dequantize() if isinstance(held, QuantizedWeight) else held.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # of FSDP2
        whole = as_dtensor(Shard(name, weight, weight.shape, None), weight, sharding, self.mesh)
        return whole.full_tensor() if hasattr(whole, "full_tensor") else whole

    def replicas(self, shard: Shard) -> int:
        """Ranks (or stages) that hold the same numbers: a norm over the world counts each number once."""
        if self.mesh is None:
            return 1
        grid = self.mesh.grid
        copies = grid.world // grid.pp
        cuts = [*self.sharding.axes(shard.name), *([shard.rows] if shard.rows else [])]
        for axis in cuts:
            copies //= grid.size("shard" if axis == "flat" else axis)
        if shard.name == "embed.weight" and self.spec.model.tie_embeddings and grid.pp > 1:
            copies *= 2
        return copies

    def after_step(self) -> None:
        self.after_load()
        group = None if self.mesh is None else self.mesh.group("dp_cp")
        for part in self.parts.values():
            update_balance(part, group)

    def buffers(self) -> dict[str, Tensor]:
        """What is part of the model's state and not trained by gradients; equal on all ranks that have it."""
        return {unwrapped(name): buffer for part in self.parts.values() for name, buffer in part.named_buffers()}

    def after_load(self) -> None:
        """After the leaves were filled from a checkpoint."""
        for strategy in self.strategies.values():
            strategy.after_step()

    def reshard(self) -> None:
        """Let go of weights that a forward pass without gradients left gathered: FSDP2's."""
        for strategy in self.strategies.values():
            if hasattr(strategy, "reshard"):
                strategy.reshard()

    def zero_grad(self) -> None:
        """Drop the gradients, and what a step that was not taken has counted."""
        for strategy in self.strategies.values():
            strategy.zero_grad()
        for part in self.parts.values():
            for layer in moe_layers(part):
                layer.expert_counts = None

    # --- inputs -----------------------------------------------------------------------------------------

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The keywords of GPT.forward for this rank's share of a micro-batch."""
        batch = batch.to(self.device)
        common = {"reduction": "sum", "keep_logits": False}
        if self.mesh is None:
            return {"tokens": batch.tokens, "targets": batch.targets, "documents": batch.documents, **common}
        model, heads = self.spec.model, local_heads(self.spec.model, self.mesh)
        if self.size("cp") > 1:
            from .context_parallel import make_attend, split

            local = split(batch, self.spec.parallel, self.mesh)
            attend = make_attend(model, self.spec.parallel, self.mesh, local, heads)
            own = {"tokens": local.tokens, "targets": local.targets, "positions": local.positions}
            return {**own, "attend": attend, **common}
        attend = dense(model, self.device, batch.documents, heads=heads, seq=batch.tokens.shape[1])
        positions = default_positions(batch.tokens, batch.documents)
        return {"tokens": batch.tokens, "targets": batch.targets, "positions": positions, "attend": attend, **common}

    # --- evaluation -------------------------------------------------------------------------------------

    def held_out_share(self, count: int, batch_at: Callable[[int], Batch]) -> list[Batch]:
        """This rank's micro-batches of an evaluation."""
        ranks, mine = self.size("dp"), 0 if self.mesh is None else self.mesh.rank("dp")
        return [
            batch_at(first + mine) if first + mine < count else with_ignored_targets(batch_at(first))
            for first in range(0, count, ranks)
        ]

    @torch.no_grad()
    def evaluate(
        self,
        count: int,
        batch_at: Callable[[int], Batch],
        loss_of: LossOf | None = None,
        units_of: Callable[[Batch], int] = Batch.count,
    ) -> tuple[float, int]:
        """Loss sum and its units (counted tokens) of micro-batches 0 … count − 1, over all ranks.

        Each data-parallel rank takes every dp-th; one that is left without a batch takes part in the collectives
        with a batch of which nothing counts.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        share = self.held_out_share(count, batch_at)
        depth = self.size("pp")  # micro-batches at once: enough to keep every stage of a pipeline busy
        for batches in (share[i : i + depth] for i in range(0, len(share), depth)):
            if self.pipeline is not None:
                loss = self.pipeline.evaluate([self.inputs(batch) for batch in batches])
            else:
                loss = (loss_of or next_token_loss)(self.forward, batches[0])
            total[0] += loss.double().sum() / self.size("tp")
            if self.mesh is None or all(self.mesh.rank(axis) == 0 for axis in ("pp", "tp", "cp")):
                total[1] += sum(units_of(batch) for batch in batches)
        if self.mesh is not None:
            dist.all_reduce(total)
        loss_sum, tokens = total.tolist()
        return loss_sum, int(tokens)


def named_weights(part: GPT) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
    """As named_parameters, but of a quantized layer its weight instead of what that is stored in, before adapters."""
    for prefix, module in part.named_modules():
        if isinstance(module, QuantizedWeight):
            continue
        if isinstance(module, Linear) and module.quantized is not None:
            yield f"{prefix}.weight", module.quantized
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter


def next_token_loss(forward: Callable[..., Any], batch: Batch) -> Tensor:
    """The sum of −log p over the targets that count."""
    loss: Tensor
    _, loss = forward(batch)
    return loss


def with_ignored_targets(batch: Batch) -> Batch:
    return replace(batch, targets=torch.full_like(batch.targets, IGNORE), counted=0)


def sum_gradients(shards: list[Shard], group: dist.ProcessGroup) -> None:
    """One all-reduce for all of them."""
    gradients = [shard.leaf.grad for shard in shards if shard.leaf.grad is not None and shard.leaf.numel()]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def tied_group(spec: RunSpec, mesh: Mesh | None) -> dist.ProcessGroup | None:
    """The first and the last pipeline rank of this rank's line, where they hold the two copies of a tied embedding."""
    if mesh is None or mesh.size("pp") == 1 or not spec.model.tie_embeddings or spec.parallel.schedule in V_SHAPED:
        return None
    mine = None
    for line in mesh.grid.groups("pp"):  # every rank makes every group, in the same order
        group = dist.new_group([line[0], line[-1]])
        if dist.get_rank() in (line[0], line[-1]):
            mine = group
    return mine
