"""Divergence of a student's next-token distributions from a teacher's, chunked so that the logits of neither are
materialised as a whole.

With s and t the logits of student and teacher over temperature, p and q their softmax, m = β q + (1 − β) p:

    forward   KL(q ‖ p)                              ∂ / ∂ s = p − q
    reverse   KL(p ‖ q)                              ∂ / ∂ s = p (log p − log q − KL(p ‖ q))
    jsd       β KL(q ‖ m) + (1 − β) KL(p ‖ m)        ∂ / ∂ s = (1 − β) p (log p − log m − KL(p ‖ m))

The loss is a sum over tokens, so a chunk of them is finished at once, as in `cross_entropy`: the gradient of its logits
is multiplied into those of hidden states and head within the forward pass. `lmworks.align.distill_loss` is the same
over whole logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...spec import LMWorksError
from .cross_entropy import IGNORE, WeightGradient, cast_rows, chunk_rows, padded_vocab, scaled, soft_cap_in_place
from .token_logprobs import VocabShard

DivergenceKind = Literal["forward", "reverse", "jsd"]
CHUNKS_OF_LOGPROBS = 2  # a chunk of log-probabilities is cut into so many: five tables of its size are alive at once


@dataclass(frozen=True)
class Teacher:
    """What a student is compared with, and how."""

    hidden: Tensor  # (…, width): its last hidden states
    weight: Tensor  # (vocab, width): its head
    softcap: float = 0.0
    kind: DivergenceKind = "forward"
    temperature: float = 1.0
    jsd_beta: float = 0.5


class TokenDivergence(NamedTuple):
    loss: Tensor  # sum over the targets that count, an fp32 scalar
    agreement: Tensor  # per token 1 where both have the same likeliest token; 0 where the target is not counted
    logps: Tensor  # of the targets, by the student; without gradient


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Teacher,
    *,
    softcap: float = 0.0,
    shard: VocabShard | None = None,
) -> TokenDivergence:
    """hidden (…, width), weight (vocab, width), targets (…), which say what counts.

    Rows that only one of the heads has, a padding of its vocabulary, are left out. `shard`: both heads have the rows of
    this rank's range of the vocabulary; the gradient of `hidden` is then this rank's part of the sum over ranks.
    """
    device = hidden.device
    if torch.is_autocast_enabled(device.type):
        hidden = hidden.to(torch.get_autocast_dtype(device.type))
    if not torch.is_grad_enabled():  # an autograd.Function would compute gradients regardless
        hidden, weight = hidden.detach(), weight.detach()
    return TokenDivergence(*LinearDivergence.apply(hidden, weight, targets, teacher, softcap, shard))


def divergence_rows(tokens: int, vocab: int, device_type: str) -> int:
    """Tokens of a chunk."""
    return max(1, chunk_rows(tokens, vocab, device_type, itemsize=4, in_place=False) // CHUNKS_OF_LOGPROBS)


class LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: Teacher,
        softcap: float,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        want_hidden, want_weight, *_ = ctx.needs_input_grad
        with_grad = want_hidden or want_weight
        states, flat = hidden.flatten(0, -2), targets.flatten()
        vocab = min(weight.shape[0], teacher.weight.shape[0])
        seen = vocab if shard else padded_vocab(vocab, hidden)
        own_head = cast_rows(weight[:vocab], seen, hidden.dtype)
        teacher_states = teacher.hidden.flatten(0, -2)
        teacher_head = cast_rows(teacher.weight[:vocab], seen, teacher_states.dtype)
        grad_hidden = torch.empty_like(states) if want_hidden else None
        wide, fused = torch.promote_types(weight.dtype, torch.float32), weight.device.type == "cuda"
        grad_weight = WeightGradient(weight.new_empty(own_head.shape, dtype=wide), fused) if want_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        agreement = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        logps = torch.zeros_like(agreement)
        rows = divergence_rows(len(flat), seen, hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(flat), rows):
                part = slice(start, start + rows)
                logits = F.linear(states[part], own_head)
                slope = soft_cap_in_place(logits, softcap, with_grad) if softcap else None
                theirs = F.linear(teacher_states[part], teacher_head)
                if teacher.softcap:
                    soft_cap_in_place(theirs, teacher.softcap, with_grad=False)
                theirs = theirs[:, :vocab].float().div_(teacher.temperature)
                ours = logits[:, :vocab].float().div_(teacher.temperature)
                found = compare(ours, theirs, flat[part], teacher, shard, with_grad)
                counted = flat[part] != IGNORE
                loss += torch.where(counted, found.divergence, 0.0).sum()
                agreement.view(-1)[part] = found.agreement & counted
                logps.view(-1)[part] = torch.where(counted, found.logps, 0.0)
                if found.gradient is not None:
                    torch.mul(found.gradient, (counted / teacher.temperature).unsqueeze(1), out=logits[:, :vocab])
                    logits[:, vocab:] = 0
                    if slope is not None:
                        logits.mul_(slope)
                if grad_hidden is not None:
                    torch.mm(logits, own_head, out=grad_hidden[part])
                if grad_weight is not None:
                    grad_weight.add(logits, states[part])
                del logits, slope, ours, theirs, found  # before the next chunk is allocated
        total = None if grad_weight is None else with_rows(grad_weight.rows(vocab), weight.shape[0])
        ctx.save_for_backward(None if grad_hidden is None else grad_hidden.view(hidden.shape), total)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(agreement, logps)
        return loss, agreement, logps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: saved gradients are constants
            raise LMWorksError("this divergence can be differentiated once; for more use lmworks.align.distill_loss")
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = scaled(grad_hidden, grads[0], grad_hidden.dtype, "torch")
        if grad_weight is not None:
            grad_weight = scaled(grad_weight, grads[0], ctx.weight_dtype, "torch")
        return grad_hidden, grad_weight, None, None, None, None


def with_rows(grad: Tensor, rows: int) -> Tensor:
    """The gradient of a head whose last rows, a padding of the vocabulary, were left out."""
    return grad if grad.shape[0] == rows else F.pad(grad, (0, 0, 0, rows - grad.shape[0]))


class Compared(NamedTuple):
    """Of a chunk of tokens."""

    divergence: Tensor
    agreement: Tensor  # bool
    logps: Tensor
    gradient: Tensor | None  # of the student's logits over temperature, (rows, vocab)


def compare(
    ours: Tensor, theirs: Tensor, targets: Tensor, teacher: Teacher, shard: VocabShard | None, with_grad: bool
) -> Compared:
    """Logits over temperature, (rows, vocab) in fp32 each; they are overwritten. Sums are over all ranks' ranges."""
    log_sums, likeliest, wanted = row_figures(ours, theirs, targets, shard)
    log_p, log_q = ours.sub_(log_sums[0].unsqueeze(1)), theirs.sub_(log_sums[1].unsqueeze(1))
    gradient: Tensor | None = None
    if teacher.kind == "forward":
        q = log_q.exp()
        (divergence,) = over_ranks([(q * log_q.sub_(log_p)).sum(1)], shard)
        if with_grad:
            gradient = log_p.exp_().sub_(q)
    elif teacher.kind == "reverse":
        ratio, p = log_q.neg_().add_(log_p), log_p.exp_()
        (divergence,) = over_ranks([(p * ratio).sum(1)], shard)
        if with_grad:
            gradient = ratio.sub_(divergence.unsqueeze(1)).mul_(p)
    else:
        beta = teacher.jsd_beta
        log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
        of_teacher = (log_q.exp() * log_q.sub_(log_m)).sum(1)
        ratio, p = log_m.neg_().add_(log_p), log_p.exp_()
        of_teacher, of_student = over_ranks([of_teacher, (p * ratio).sum(1)], shard)
        divergence = beta * of_teacher + (1 - beta) * of_student
        if with_grad:
            gradient = ratio.sub_(of_student.unsqueeze(1)).mul_(p).mul_(1 - beta)
    return Compared(divergence, likeliest[0] == likeliest[1], wanted - log_sums[0], gradient)


def row_figures(
    ours: Tensor, theirs: Tensor, targets: Tensor, shard: VocabShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """log Σ exp and the likeliest token of student and teacher, (2, rows) each; the student's logit of the target."""
    start = 0 if shard is None else shard.start
    column = targets - start
    here = (column >= 0) & (column < ours.shape[1])
    wanted = ours.gather(1, torch.where(here, column, 0).unsqueeze(1)).squeeze(1) * here
    log_sums = torch.stack([ours.logsumexp(1), theirs.logsumexp(1)])
    largest, place = (torch.stack(pair) for pair in zip(ours.max(1), theirs.max(1), strict=True))
    if shard is None:
        return log_sums, place, wanted
    own = torch.cat([log_sums, largest, (place + start).float(), wanted.unsqueeze(0)])  # ids are exact below 2²⁴
    ranks = shard.all_gather(own)  # (ranks, 7, rows)
    best = ranks[:, 2:4].argmax(0, keepdim=True)
    return ranks[:, :2].logsumexp(0), ranks[:, 4:6].gather(0, best).squeeze(0), ranks[:, 6].sum(0)


def over_ranks(own: list[Tensor], shard: VocabShard | None) -> list[Tensor]:
    """Sums of all ranks, (rows) each."""
    return own if shard is None else list(shard.all_gather(torch.stack(own)).sum(0))
