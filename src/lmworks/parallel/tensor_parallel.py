"""Tensor parallelism in the Megatron sense: the ranks of `tp` share every matrix product of a layer.

Attention and MLP are each one region. It is entered once, works on this rank's heads or this rank's part of the ffn,
and is left by a sum over ranks:

    enter → column-parallel (q, k, v; gate, up: sharded by output) → row-parallel (out; down: by input) → leave

Without sequence parallelism the residual stream is whole on every rank: entering is free (its gradient is summed),
leaving is an all-reduce. With it a rank has 1/tp of the positions: entering is an all-gather, leaving a
reduce-scatter, and what stands between regions (norms, residual sums) is computed and saved once, not tp times. The
bytes sent are the same. Either way a layer has two exchanges forward and two backward
(Shoeybi et al. 2019; Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..kernels.training.cross_entropy import IGNORE, linear_cross_entropy
from ..kernels.training.token_divergence import linear_divergence
from ..kernels.training.token_logprobs import VocabShard, linear_logprobs
from ..model.gpt import GPT, Block, Embedding, Linear
from ..model.lora import LowRankAdapter
from ..model.moe import MoE
from ..spec import ModelSpec, ParallelSpec, SpecError, components
from . import collectives
from .mesh import Mesh
from .sharding_plan import ShardingPlan

SEQ = 1  # dimension of positions in (batch, seq, hidden)


def apply_tensor_parallel(part: GPT, parallel: ParallelSpec, mesh: Mesh, sharding: ShardingPlan) -> None:
    """Shard a network, or one pipeline stage of it, in place, and record it in `sharding`.

    Names stay. What changes for a caller: with `parallel.sp` hidden states between stages are (batch, seq / tp, hidden)
    and `positions` must be given to a stage that is not the first; ALiBi wants `attend=dense(…, heads=local_heads(…))`;
    `part(tokens)` gives the logits of this rank's range of the vocabulary, and a loss needs `keep_logits=False`.
    """
    if mesh.size("tp") == 1:
        return
    parallelizer = TensorParallelizer(mesh, sharding, Region(mesh.group("tp"), parallel.sp))
    for layer, block in zip(part.blocks, part.layers(), strict=True):
        parallelizer.shard_block(block, f"blocks.{layer}.", part)
    parallelizer.shard_embedding_and_head(part)


def local_heads(spec: ModelSpec, mesh: Mesh) -> slice:
    """The query heads that this rank computes."""
    count = spec.heads // mesh.size("tp")
    return slice(mesh.rank("tp") * count, (mesh.rank("tp") + 1) * count)


@dataclass(frozen=True)
class Region:
    """How a tensor-parallel region is entered and left."""

    group: ProcessGroup
    sequence: bool  # outside of it a rank has its 1/tp of the positions

    def enter(self, x: Tensor) -> Tensor:
        return (
            collectives.gather_to_region(x, SEQ, self.group)
            if self.sequence
            else collectives.copy_to_region(x, self.group)
        )

    def enter_in_autocast_dtype(self, x: Tensor) -> Tensor:
        """Products in the region take their input in autocast's precision: it is sent in that."""
        device = x.device.type
        return self.enter(x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x)

    def leave(self, x: Tensor) -> Tensor:
        return (
            collectives.scatter_from_region(x, SEQ, self.group)
            if self.sequence
            else collectives.reduce_from_region(x, self.group)
        )


class RowShardedLinear(Linear):
    """Row-parallel: sharded by input. Products are summed over ranks on leaving the region, then the bias is added."""

    def __init__(self, linear: Linear, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear.weight.shape[1], linear.weight.shape[0], bias=False, device="meta")
        self.weight, self.bias, self.leave = linear.weight, linear.bias, leave
        self.adapters = linear.adapters

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(self.product(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ReplicatedKVLinear(Linear):
    """Keys or values with more ranks than KV heads: the weight is replicated, and a rank computes the head it needs."""

    def __init__(self, whole: Linear, head: int, head_dim: int) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False, device="meta")
        self.weight, self.bias, self.adapters = whole.weight, whole.bias, whole.adapters
        self.rows = slice(head * head_dim, (head + 1) * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters is None and self.quantized is None:
            return F.linear(x, self.weight[self.rows], None if self.bias is None else self.bias[self.rows])
        y = self.product(x, self.rows)
        return y if self.bias is None else y + self.bias[self.rows].to(y.dtype)


class SequenceParallelPositions(Embedding):
    """Learned positions of this rank's part of the sequence."""

    def __init__(self, whole: Embedding, mesh: Mesh) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self.weight, self.parts, self.index = whole.weight, mesh.size("tp"), mesh.rank("tp")

    def forward(self, positions: Tensor) -> Tensor:  # (seq) or (batch, seq)
        return super().forward(positions.chunk(self.parts, dim=-1)[self.index])


@dataclass(frozen=True)
class TensorParallelizer:
    """Shards the modules of one network."""

    mesh: Mesh
    sharding: ShardingPlan
    region: Region

    def shard_block(self, block: Block, prefix: str, part: GPT) -> None:
        """Shard weights as the components say, then wrap the regions: attention, and the MLP or the experts."""
        spec = part.spec.at(block.attention.layer)
        for weight in (*components.block_weights(spec), *part.adapter_weights):
            self.shard_weight(block, prefix, weight)
        mixture = isinstance(block.mlp, MoE)
        for linear in components.linears(spec):
            if linear.shard == "row":
                self.sum_row_norms(cast("Linear", block.get_submodule(linear.name)))
            if not (mixture and linear.name.startswith("mlp.")):  # experts leave their region as a whole
                self.wrap(block, linear)
        block.attention.register_forward_pre_hook(on_input(self.region.enter_in_autocast_dtype))
        if isinstance(block.mlp, MoE):
            self.shard_experts(block.mlp)
        else:
            block.mlp.register_forward_pre_hook(on_input(self.region.enter_in_autocast_dtype))

    def shard_weight(self, root: nn.Module, prefix: str, weight: components.Weight) -> None:
        """Replace a weight by this rank's shard, or record that its gradient must be summed over `tp`."""
        path, _, name = weight.name.rpartition(".")
        tp = self.mesh.size("tp")
        if (dim := weight.sharded(tp)) is not None:
            self.sharding.shard_weight(root.get_submodule(path), f"{prefix}{path}.", name, "tp", dim, self.mesh)
        elif weight.has_partial_grad(tp, self.region.sequence):
            self.sharding.partial_grads[f"{prefix}{weight.name}"] = "tp"

    def wrap(self, block: Block, linear: components.Linear) -> None:
        """Replace layers that compute more than their local product."""
        path, _, name = linear.name.rpartition(".")
        owner, tp = block.get_submodule(path), self.mesh.size("tp")
        layer = getattr(owner, name)
        if linear.shard == "row":
            setattr(owner, name, RowShardedLinear(layer, self.region.leave))
        elif linear.kv_heads % tp:  # tp / kv_heads neighbours have queries of the same key/value head
            head = self.mesh.rank("tp") * linear.kv_heads // tp
            setattr(owner, name, ReplicatedKVLinear(layer, head, linear.outputs // linear.kv_heads))

    def sum_row_norms(self, layer: Linear) -> None:
        """Of DoRA's adapters: a rank has some columns of the weight."""
        for adapter in layer.adapters.values() if layer.adapters is not None else ():
            cast(LowRankAdapter, adapter).sum_over_ranks = partial(collectives.all_reduce, group=self.region.group)

    def shard_experts(self, moe: MoE) -> None:
        """Every expert is sharded by its ffn; the router is replicated, and all ranks choose alike.

        A rank has a part of each expert's output, so the gradient of its routing weights is a part of the sum. The
        balance loss is whole on every rank, and divided by their number.
        """
        moe.balance_share /= self.mesh.size("tp")
        moe.register_forward_pre_hook(on_input(self.region.enter))
        moe.register_forward_hook(on_output(self.region.leave))

    def shard_embedding_and_head(self, part: GPT) -> None:
        """Embedding, positions, last norm, head and loss, as far as this part has them."""
        here = {name for name, _ in part.named_parameters()}
        for weight in components.root_weights(part.spec):
            if weight.name in here:
                self.shard_weight(part, "", weight)
        if part.embed is not None:
            start = self.mesh.rank("tp") * part.embed.weight.shape[0]
            part.embed = VocabParallelEmbedding(part.embed, start, self.region.leave)
        if part.positions is not None and self.region.sequence:
            part.positions = SequenceParallelPositions(part.positions, self.mesh)
        if part.norm is not None:
            part.norm.register_forward_hook(on_output(self.region.enter_in_autocast_dtype))
            part.register_forward_pre_hook(check_keep_logits, with_kwargs=True)
            part.score_grad_share = 1 / self.mesh.size("tp")
            if part.score is None:
                part.cross_entropy = partial(linear_cross_entropy, chunk=VocabParallelCrossEntropy(self.mesh))
                shard = vocab_shard(part.head_weight, self.mesh)
                part.token_logprobs = partial(linear_logprobs, shard=shard)
                part.token_divergence = partial(linear_divergence, shard=shard)


def on_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda _module, args: (change(args[0]), *args[1:])


def on_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda _module, _args, output: change(output)


def check_keep_logits(part: GPT, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets = args[1] if len(args) > 1 else kwargs.get("targets")
    if targets is not None and kwargs.get("keep_logits", True) and not part.spec.scalar_head:
        raise SpecError("parallel.tp > 1 shards the logits over ranks: ask for the loss with keep_logits=False")


# --- the vocabulary, sharded over ranks ------------------------------------------------------------------


class VocabParallelEmbedding(Embedding):
    """Rows of this rank's range; a token of another range gives zeros, and `leave` sums over ranks."""

    def __init__(self, part: Embedding, start: int, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__(part.weight.shape[0], part.embedding_dim, device="meta")
        self.weight, self.start, self.leave = part.weight, start, leave

    def forward(self, tokens: Tensor) -> Tensor:
        row, here = vocab_rows(tokens, self.start, self.weight.shape[0])
        return self.leave(F.embedding(row, self.weight) * here.unsqueeze(-1))


class VocabParallelCrossEntropy:
    """`chunk_loss` of kernels.training.cross_entropy where the logits are those of this rank's range of the vocabulary.

    Logits are the largest tensor of a step, so they are never gathered. With z the logits of one token and r the ranks,

        log Σ exp z = logsumexp over r of (logsumexp of r's own z)        loss = log Σ exp z − z[target]

    so two numbers per token are sent: a rank's logsumexp, and z[target] from the one rank that has it. The gradient of
    a rank's logits, softmax(z) − onehot(target), needs nothing more. What it gives the hidden states is a part of the
    sum over ranks, which is taken where the hidden states entered.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.group, self.rank = mesh.group("tp"), mesh.rank("tp")

    def __call__(self, logits: Tensor, target: Tensor, with_grad: bool, implementation: str) -> Tensor:
        """logits (rows, vocab / tp)"""
        counted = target != IGNORE
        index, here = vocab_rows(target, self.rank * logits.shape[1], logits.shape[1])
        if implementation == "triton":
            return self.in_place(logits, torch.where(here, index, -1), counted, with_grad)
        index, here = index.unsqueeze(1), here.unsqueeze(1)
        largest, wanted = logits.amax(dim=1, keepdim=True).float(), logits.gather(1, index).float() * here
        p = logits.float().sub_(largest).exp_()  # in fp32 in the logits' own place
        log_sum = p.sum(dim=1, keepdim=True).log() + largest
        loss, normaliser = self.loss_over_ranks(torch.cat((log_sum, wanted), dim=1).t(), counted)
        if with_grad:
            p *= (largest - normaliser.unsqueeze(1)).exp()
            p.scatter_add_(1, index, -here.to(p.dtype))
            torch.mul(p, counted.unsqueeze(1), out=logits)
        return loss

    def in_place(self, logits: Tensor, index: Tensor, counted: Tensor, with_grad: bool) -> Tensor:
        """The same by kernels; index is −1 where another rank has the target."""
        from ..kernels.training.cross_entropy_triton import gradient_in_place, row_sums

        loss, normaliser = self.loss_over_ranks(row_sums(logits, index), counted)
        if with_grad:
            gradient_in_place(logits, index, normaliser.masked_fill(~counted, torch.inf))
        return loss

    def loss_over_ranks(self, own: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """From (2, rows), a rank's log Σ exp z and z[target]: the loss, and log Σ exp z of all ranks (rows)."""
        everyones = collectives.all_gather(own.unsqueeze(0), 0, self.group)  # (tp, 2, rows)
        normaliser, wanted = everyones[:, 0].logsumexp(dim=0), everyones[:, 1].sum(dim=0)
        return ((normaliser - wanted) * counted).sum(), normaliser


def vocab_shard(head: Tensor, mesh: Mesh) -> VocabShard:
    """This rank's range of the vocabulary, for log-probabilities of tokens and divergences."""
    group = mesh.group("tp")
    return VocabShard(mesh.rank("tp") * head.shape[0], lambda own: collectives.all_gather(own.unsqueeze(0), 0, group))


def vocab_rows(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """(row of each token among the `count` rows from `start`, whether it is among them); the row is 0 where not."""
    row = tokens - start
    here = (row >= 0) & (row < count)
    return torch.where(here, row, 0), here
