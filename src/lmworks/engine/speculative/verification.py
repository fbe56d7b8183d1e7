"""Speculative decoding: draft tokens are proposed, one step of the model verifies them all, the distribution is
unchanged.

A step computes the last token and k draft tokens together, which costs little more than one token while reading the
weights takes most of the time. Row j of its logits is the distribution after draft token j − 1: as long as it agrees
with draft token j, that one is accepted, and the first row that does not agree gives a token of its own. So a step
yields one to k + 1 tokens (Leviathan et al. 2023; Chen et al. 2023).

**Acceptance.** With p the distribution of the request (temperature, top-k, top-p, min-p, bias) and q the one that draft
token x was sampled from, x is accepted with probability min(1, p(x)/q(x)), else a token is sampled from max(0, p − q),
normalised: the result is distributed as p, whatever q is. An n-gram draft has q(x) = 1: then rejection sampling is the
same as sampling from p and accepting x if it was sampled. So n-gram drafts need only the sampler, and give token for
token what the same seed gives without them. Greedy decoding is p = 1 at the likeliest token: its tokens never change.

How many draft tokens a step has depends on its batch, and so do the random numbers that accept those of a draft model:
the same seed then gives another sample of the same distribution. With engine.batch_invariant a draft model samples with
the sampler's own random numbers, and a draft token is accepted if both sample the same: somewhat less often than
Σ min(p, q), but the tokens are those of the seed.

**When.** Draft tokens cost compute once a batch keeps the device busy: a step speculates only while its rows, running
sequences · (1 + engine.guesses), are at most MAX_ROWS. Sequences with repetition penalties, a grammar, bad words or
allowed tokens do not speculate, as their logits depend on the draft tokens before; others of the batch do. A draft
token follows the latest token, so the host must wait for it, and the device for the host. It does so only if a draft
can be expected: if the proposer has one for the text without the token in flight.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels import counter_rng
from ...spec import EngineSpec
from ..core.request import Sequence, SequenceStatus
from ..core.sampler import has_penalties

# Products of an 8B model take 3.7 ms with one row in bf16, and 6.2 with so many (quant_gpu.json).
MAX_ROWS = 256
# RNG streams apart from that of the sampler: drawing a draft token, and accepting it.
DRAFT_STREAM, ACCEPT_STREAM = 0x3C6EF372FE94F82A, 0x5851F42D4C957F2D


class Proposer(Protocol):
    """Where draft tokens come from: n-grams of the text, or a draft model."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Up to `count` draft tokens after the known ones; none if nothing is expected."""
        ...


class Speculator:
    """Sets the draft tokens of a step, before it is scheduled."""

    def __init__(self, spec: EngineSpec, source: Proposer) -> None:
        self.draft_tokens, self.source = spec.guesses, source

    def active(self, running: list[Sequence]) -> bool:
        """Whether to wait for tokens in flight: one of their sequences has a draft already."""
        return self.small(running) and any(in_flight(each) and self.drafts_for(each) for each in running)

    def propose(self, running: list[Sequence]) -> None:
        small = self.small(running)
        for sequence in running:
            sequence.draft_tokens = self.drafts_for(sequence) if small and decoding(sequence) else []

    def small(self, running: list[Sequence]) -> bool:
        """Whether the batch is small enough to speculate."""
        return len(running) * (1 + self.draft_tokens) <= MAX_ROWS

    def drafts_for(self, sequence: Sequence) -> list[int]:
        count = min(self.draft_tokens, sequence.limit - len(sequence.tokens) - 1)
        return self.source.propose(sequence, count) if count > 0 and may_speculate(sequence) else []


def may_speculate(sequence: Sequence) -> bool:
    params = sequence.params
    return not (has_penalties(params) or params.structured or params.restricted)


def decoding(sequence: Sequence) -> bool:
    """Its prompt is computed, and its latest token known."""
    return (
        sequence.state is SequenceStatus.RUNNING
        and sequence.num_computed_tokens + 1 == len(sequence.tokens) == sequence.num_known_tokens
    )


def in_flight(sequence: Sequence) -> bool:
    """Its latest token is in flight."""
    return sequence.num_known_tokens < len(sequence.tokens)


def sample_draft_token(q: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    """A draft token from each row of q (rows, vocab), from an RNG stream of its own."""
    return pick(q, seeds ^ DRAFT_STREAM, output_positions)


def rejection_sample(p: Tensor, q: Tensor, draft_tokens: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    """Rejection sampling: the draft token of each row if accepted, else another. p, q (rows, vocab); others (rows).

    The draft token was sampled from q by `sample_draft_token`. The replacement of a rejected token is never the same:
    there p < q, and the residual is 0.
    """
    draft_column = draft_tokens.unsqueeze(1)
    zero = torch.zeros(1, dtype=torch.int64, device=p.device)
    chance = counter_rng.uniform(counter_rng.bits(seeds ^ ACCEPT_STREAM, output_positions, zero))  # (rows, 1)
    accepted = chance * q.gather(1, draft_column) < p.gather(1, draft_column)
    rest = (p - q).clamp_(min=0)
    # p = q has no residual: rejections are due to rounding, and the replacement is drawn from p.
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p)
    return torch.where(accepted.squeeze(1), draft_tokens, pick(rest, seeds, output_positions))


def pick(weights: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    """Sample a token of each row, with probabilities proportional to `weights` (rows, vocab)."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    return (weights.log() + counter_rng.gumbel(counter_rng.bits(seeds, output_positions, ids))).argmax(dim=1)
