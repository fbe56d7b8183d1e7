"""Speculative decoding: tokens are guessed ahead, one step of the model judges them all, and the distribution stays.

A step computes the last token and k guesses side by side, which costs little more than one token while the weights
are what takes the time to read. Row j of its logits says what may follow guess j − 1; as long as it agrees with
guess j that guess is accepted, and the first row that does not agree gives a token of its own, so a step brings one
to k + 1 tokens (Leviathan et al. 2023; Chen et al. 2023).

**Agreement.** With p the distribution that the sequence asked for (temperature, top-k, top-p, min-p, bias, all of
it) and q the one that guess x was drawn from, x is accepted with probability min(1, p(x)/q(x)), else a token is drawn
from max(0, p − q), scaled to 1: what comes out is distributed as p, whatever q is. A guess from the text itself has
q(x) = 1: then it is the same to draw from p, and to accept x where x is what was drawn. So n-gram guesses need nothing
but the sampler, and give token for token what the same seed gives without them. Greedy decoding is p = 1 at the
likeliest token: its tokens never change.

How many guesses a step has depends on its batch, and with them which random numbers decide about a draft's: there the
same seed gives another draw from the same distribution. Where results may not depend on the batch
(engine.batch_invariant), a draft draws with the very numbers that the sampler will draw with, and is right where both
come to the same token: somewhat less often than Σ min(p, q), but the tokens are those of the seed.

**When.** Guesses cost compute where a batch is large enough to keep the device busy: a step speculates only while its
rows, running sequences · (1 + engine.guesses), are at most LARGEST. Sequences with penalties on repetition or with a
grammar are left alone, for what they allow at a row depends on the guesses before it; their batch mates go on guessing.
A guess follows the latest token, so the host has to wait for that, and the device for the host. It does so only where
a guess can be expected: where the source has one for the text without the token that is under way.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels import counter_rng
from ...spec import EngineSpec
from ..core.request import Sequence, State
from ..core.sampler import penalised

# Rows of a step: products of an 8B model take 3.7 ms with one in bf16, and 6.2 with so many (quant_gpu.json).
LARGEST = 256
# Random numbers of other streams than those that tokens are drawn with: a guess, and whether it is accepted.
GUESSED, ACCEPTED = 0x3C6EF372FE94F82A, 0x5851F42D4C957F2D


class Source(Protocol):
    """Where guesses come from."""

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        """Up to so many tokens to follow those that are known; none where nothing is expected."""
        ...


class Speculator:
    """Sets the guesses of a step, before it is scheduled."""

    def __init__(self, spec: EngineSpec, source: Source) -> None:
        self.guesses, self.source = spec.guesses, source

    def active(self, running: list[Sequence]) -> bool:
        """Whether tokens that are under way are worth waiting for: there is a guess already for one of them."""
        return self.small(running) and any(under_way(each) and self.guess(each) for each in running)

    def propose(self, running: list[Sequence]) -> None:
        small = self.small(running)
        for sequence in running:
            sequence.guesses = self.guess(sequence) if small and decoding(sequence) else []

    def small(self, running: list[Sequence]) -> bool:
        """Whether the batch is small enough for guesses."""
        return len(running) * (1 + self.guesses) <= LARGEST

    def guess(self, sequence: Sequence) -> list[int]:
        count = min(self.guesses, sequence.limit - len(sequence.tokens) - 1)
        return self.source.guess(sequence, count) if count > 0 and may_guess(sequence) else []


def may_guess(sequence: Sequence) -> bool:
    return not (penalised(sequence.params) or sequence.params.shaped)


def decoding(sequence: Sequence) -> bool:
    """Its prompt is computed, and its latest token known."""
    return sequence.state is State.RUNNING and sequence.computed + 1 == len(sequence.tokens) == sequence.known


def under_way(sequence: Sequence) -> bool:
    """Its latest token is being picked."""
    return sequence.known < len(sequence.tokens)


def draw_guess(q: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """A token from each row of q (rows, vocab), with numbers that nothing else uses."""
    return pick(q, seeds ^ GUESSED, places)


def judge(p: Tensor, q: Tensor, guesses: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """For each row the guess, where it is accepted, or another token: p, q (rows, vocab); the others (rows).

    The guess was drawn from q by `draw_guess`. A token that stands in for a refused one is never the same: there
    p < q, and nothing is left of it.
    """
    of_guess = guesses.unsqueeze(1)
    zero = torch.zeros(1, dtype=torch.int64, device=p.device)
    chance = counter_rng.uniform(counter_rng.bits(seeds ^ ACCEPTED, places, zero))  # (rows, 1)
    accepted = chance * q.gather(1, of_guess) < p.gather(1, of_guess)
    rest = (p - q).clamp_(min=0)
    # p = q has no rest: every guess is accepted but for rounding, and what stands in for that one is drawn from p.
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p)
    return torch.where(accepted.squeeze(1), guesses, pick(rest, seeds, places))


def pick(weights: Tensor, seeds: Tensor, places: Tensor) -> Tensor:
    """A token of each row, with probabilities in proportion to `weights` (rows, vocab)."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    return (weights.log() + counter_rng.gumbel(counter_rng.bits(seeds, places, ids))).argmax(dim=1)
