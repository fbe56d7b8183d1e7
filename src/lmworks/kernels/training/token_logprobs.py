"""Log-probability of every target token, chunked so that the logits are never materialised as a whole.

Losses of post-training (DPO, PPO, GRPO …) are functions of the log-probability of each token, so the gradient of a
token's logits is known only after all chunks were computed. The forward pass therefore saves one number per token, the
log-sum-exp of its logits, and the backward pass computes the logits of a chunk again:

    logp = z[target] − log Σ exp z          ∂ logp / ∂ z = onehot(target) − softmax(z)

`cross_entropy`, whose gradient is a sum over tokens with equal weights, needs no second product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import LMWorksError
from ..dispatch import pick
from ..scores import soft_cap
from .cross_entropy import (
    IGNORE,
    IMPLEMENTATIONS,
    WeightGradient,
    cast_rows,
    chunk_rows,
    padded_vocab,
    soft_cap_in_place,
    sum_dtype,
)


class TokenLogprobs(NamedTuple):
    logps: Tensor  # fp32; 0 where the target is not counted
    entropies: Tensor  # of the distribution over the vocabulary, fp32, without gradient; 0 where it was not asked for


class VocabShard(NamedTuple):
    """The range of the vocabulary whose logits this rank computes, and how sums over all ranks are taken."""

    start: int
    all_gather: Callable[[Tensor], Tensor]  # (values, rows) of this rank → (ranks, values, rows)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, softcap: float = 0.0
) -> TokenLogprobs:
    """log softmax(hidden · weightᵀ / temperature)[target], and the entropy of that softmax."""
    log_p = F.log_softmax(soft_cap(F.linear(hidden, weight).float(), softcap) / temperature, dim=-1)
    counted = targets != IGNORE
    logps = log_p.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    entropies = -(log_p.exp() * log_p).sum(dim=-1).detach()
    return TokenLogprobs(torch.where(counted, logps, 0.0), torch.where(counted, entropies, 0.0))


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
    implementation: str | None = None,
) -> TokenLogprobs:
    """As `reference`: hidden (…, width), weight (vocab, width), targets (…) → (…) each.

    `shard`: `weight` has the rows of this rank's range of the vocabulary. The gradient of `hidden` is then this rank's
    part of the sum over ranks.
    """
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    shape = {"tokens": targets.numel(), "vocab": weight.shape[0], "hidden": weight.shape[1]}
    chosen = pick("linear_cross_entropy", implementation, IMPLEMENTATIONS, device, **shape)
    return TokenLogprobs(
        *LinearLogprobs.apply(hidden, weight, targets, temperature, softcap, with_entropy, shard, chosen)
    )


class LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float,
        with_entropy: bool,
        shard: VocabShard | None,
        implementation: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.hidden_shape, shape = (
            hidden.shape,
            targets.shape,
        )  # of the outputs, which are no views: FSDP2 hangs hooks on them
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        chunks = Chunks(hidden, weight, targets, temperature, softcap, shard, implementation)
        found = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(found)
        logps, entropies = found.view(-1), entropy.view(-1)
        log_sums = torch.empty_like(logps)
        for part in chunks.parts():
            logits, index, counted = chunks.logits(part), *chunks.index(part)
            rows = chunks.row_sums(logits, index, with_entropy)
            log_sums[part] = rows[0]
            logps[part] = torch.where(counted, rows[1] - rows[0], 0.0)
            if with_entropy:
                entropies[part] = torch.where(counted, rows[2], 0.0)
            del logits
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        ctx.options = (temperature, softcap, shard, implementation)
        ctx.mark_non_differentiable(entropy)
        return found, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: chunks are computed without one
            raise LMWorksError("log-probabilities of tokens can be differentiated once")
        hidden, weight, targets, log_sums = ctx.saved_tensors
        grad = grads[0].flatten()
        want_hidden, want_weight, *_ = ctx.needs_input_grad
        chunks = Chunks(hidden, weight, targets, *ctx.options)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = chunks.weight_gradient() if want_weight else None
        for part in chunks.parts():
            logits, slope = chunks.capped_logits(part)
            index, counted = chunks.index(part)
            chunks.gradient(logits, index, log_sums[part], torch.where(counted, grad[part], 0.0), slope)
            if grad_hidden is not None:
                torch.mm(logits, chunks.weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.add(logits, hidden[part])
            del logits, slope
        total = None if grad_weight is None else grad_weight.rows(weight.shape[0]).to(weight.dtype)
        return None if grad_hidden is None else grad_hidden.view(ctx.hidden_shape), total, *[None] * 6


class Chunks:
    """Logits of some tokens at a time, their sums, and their gradient."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        softcap: float,
        shard: VocabShard | None,
        implementation: str,
    ) -> None:
        self.hidden, self.targets, self.shard = hidden, targets, shard
        self.temperature, self.softcap = temperature, softcap
        self.triton = implementation == "triton"
        self.vocab, self.dtype = weight.shape[0], weight.dtype
        seen = self.vocab if shard else padded_vocab(self.vocab, hidden)
        self.rows = chunk_rows(hidden.shape[0], seen, hidden.device.type, hidden.itemsize, self.triton)
        self.weight = cast_rows(weight.detach(), seen, hidden.dtype)

    def parts(self) -> list[slice]:
        tokens = self.hidden.shape[0]
        return [slice(start, min(start + self.rows, tokens)) for start in range(0, tokens, self.rows)]

    def weight_gradient(self) -> WeightGradient:
        wide = sum_dtype(self.hidden, self.weight.new_empty(0, dtype=self.dtype), len(self.parts()), self.triton)
        fused = self.triton and self.weight.device.type == "cuda" and wide == torch.float32
        return WeightGradient(self.weight.new_empty(self.weight.shape, dtype=wide), fused)

    def capped_logits(self, part: slice) -> tuple[Tensor, Tensor | None]:
        """Divided by the temperature; and the derivative of the soft cap, where there is one."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = F.linear(self.hidden[part].detach(), self.weight)
        slope = soft_cap_in_place(logits, self.softcap, with_grad=True) if self.softcap else None
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits, slope

    def logits(self, part: slice) -> Tensor:
        return self.capped_logits(part)[0]

    def index(self, part: slice) -> tuple[Tensor, Tensor]:
        """(column of each target, −1 where this rank does not have it or it is not counted; whether it is counted)."""
        targets, start = self.targets[part], 0 if self.shard is None else self.shard.start
        counted = targets != IGNORE
        column = targets - start
        return torch.where(counted & (column >= 0) & (column < self.vocab), column, -1), counted

    def row_sums(self, logits: Tensor, index: Tensor, with_entropy: bool) -> Tensor:
        """(2 or 3, rows): log Σ exp z, z[target], and the entropy of softmax(z); over all ranks."""
        if self.triton:
            from .cross_entropy_triton import row_sums

            own = [*row_sums(logits, index, self.vocab)]
        else:
            z = logits[:, : self.vocab].float()
            wanted = z.gather(1, index.clamp(min=0).unsqueeze(1)).squeeze(1)
            own = [z.logsumexp(dim=1), torch.where(index >= 0, wanted, 0.0)]
        if with_entropy:
            log_p = logits[:, : self.vocab].float() - own[0].unsqueeze(1)
            own.append(-(log_p.exp() * log_p).sum(dim=1))
        if self.shard is None:
            return torch.stack(own)
        ranks = self.shard.all_gather(torch.stack(own))
        log_sums = ranks[:, 0].logsumexp(dim=0)
        whole = [log_sums, ranks[:, 1].sum(dim=0)]
        if with_entropy:  # of the ranges, weighted by their probability, and of the choice of a range
            log_share = ranks[:, 0] - log_sums
            whole.append((log_share.exp() * (ranks[:, 2] - log_share)).sum(dim=0))
        return torch.stack(whole)

    def gradient(self, logits: Tensor, index: Tensor, log_sums: Tensor, grad: Tensor, slope: Tensor | None) -> None:
        """logits ← (onehot(target) − softmax(logits)) · grad / temperature · slope of the soft cap."""
        factor = (-grad / self.temperature).unsqueeze(1)
        if self.triton:
            from .cross_entropy_triton import gradient_in_place

            gradient_in_place(logits, index, log_sums, self.vocab)
            logits.mul_(factor.to(logits.dtype) if slope is None else factor)
        else:
            p = logits.float().sub_(log_sums.unsqueeze(1)).exp_()
            p.scatter_add_(1, index.clamp(min=0).unsqueeze(1), -(index >= 0).to(p.dtype).unsqueeze(1))
            torch.mul(p, factor, out=logits)
            logits[:, self.vocab :] = 0
        if slope is not None:
            logits.mul_(slope)
