"""What a step brings back: tokens of the sequences that wanted one, and log-probabilities where they were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.gpt import GPT
from .request import Logprob, Sequence
from .sampler import Sampled, likeliest
from .scheduler import Chunk

LOGITS_AT_ONCE = 2**25  # elements of one chunk of a prompt's logits: 128 MiB in fp32


@dataclass(slots=True)
class TokenOutput:
    """What one chunk came to."""

    tokens: list[int]
    logprobs: list[Logprob] | None = None
    bad: bool = False  # the logits were not finite, or nothing was allowed: the tokens mean nothing


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the tokens from index `first` of a prompt on."""

    sequence: Sequence
    first: int
    logprobs: list[Logprob]


@dataclass(frozen=True)
class Asked:
    """Positions of one chunk whose next token is of the prompt, and wanted: flat indices `at` … `at + count`."""

    sequence: Sequence
    first: int  # index in the prompt of the token after the first of them
    at: int
    count: int

    @property
    def targets(self) -> list[int]:
        return self.sequence.tokens[self.first : self.first + self.count]

    @property
    def top(self) -> int:
        return self.sequence.params.prompt_logprobs or 0


def asked_of(chunks: list[Chunk]) -> list[Asked]:
    asked, at = [], 0
    for chunk in chunks:
        sequence = chunk.sequence
        count = min(chunk.count, sequence.prompt - 1 - chunk.start)
        if sequence.params.prompt_logprobs is not None and count > 0:
            asked.append(Asked(sequence, chunk.start + 1, at, count))
        at += chunk.count
    return asked


def prompt_logprobs(
    model: GPT, valid: int, states: Tensor, asked: list[Asked], invariant: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of all that is asked, one after another: (positions), and the likeliest ids (below `valid`) and theirs.

    `invariant`: row by row, for the order of sums over a row of logits may depend on how many rows there are.
    """
    places = sent([place for each in asked for place in range(each.at, each.at + each.count)], states.device)
    targets = sent([token for each in asked for token in each.targets], states.device)
    top = max(each.top for each in asked)
    results = []
    for some, wanted in zip(in_pieces(places, model), in_pieces(targets, model), strict=True):
        logits = model.logits(states[some]).float()
        each = 1 if invariant else len(logits)
        for part, targets_of_it in zip(logits.split(each), wanted.split(each), strict=True):
            own = part.gather(1, targets_of_it.unsqueeze(1)).squeeze(1) - part.logsumexp(dim=1)
            results.append((own, *(likeliest(part, valid, top) if top else (own, own))))
    own, ids, others = (torch.cat(part) for part in zip(*results, strict=True))
    return (own, ids, others) if top else (own, None, None)


def sent(numbers: list[int], device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def in_pieces(rows: Tensor, model: GPT) -> tuple[Tensor, ...]:
    """As many rows at once as their logits may take."""
    return rows.split(max(1, LOGITS_AT_ONCE // model.spec.vocab))


@dataclass(frozen=True)
class Launched:
    """A step on its way. Its tensors are on the host once `arrived` has happened."""

    chunks: list[Chunk]  # those that pick tokens
    sampled: Sampled | None
    asked: list[Asked]
    prompt: tuple[Tensor, Tensor | None, Tensor | None] | None
    draft_tokens: Tensor | None  # (rows): the guess that each row speaks of, where the step has guesses
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()

    def read(self) -> list[TokenOutput]:
        """One for each chunk that picks, in order. Waits for the device."""
        self.wait()
        if self.sampled is None:
            return []
        sampled = self.sampled
        tokens, bad = sampled.tokens.tolist(), sampled.bad.tolist()
        logprobs = None if sampled.logprob is None else list(listed(sampled.logprob, *sampled[2:4]))
        draft_tokens = [] if self.draft_tokens is None else self.draft_tokens.tolist()
        token_output, row = [], 0
        for chunk in self.chunks:
            end = row + 1
            # A row speaks of the place after a guess: it counts only where the row before agreed with that guess.
            while end < row + chunk.wanted and tokens[end - 1] == draft_tokens[end - 1] and not bad[end - 1]:
                end += 1
            params = chunk.sequence.params
            found = None
            if logprobs is not None and params.scored:
                found = [as_logprob(tokens[i], logprobs[i], params.logprobs or 0) for i in range(row, end)]
            token_output.append(TokenOutput(tokens[row:end], found, any(bad[row:end])))
            row += chunk.wanted
        return token_output

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """What this step computed of prompts whose log-probabilities are asked for. Waits for the device."""
        self.wait()
        if self.prompt is None:
            return []
        rows = listed(*self.prompt)
        return [
            PromptLogprobs(
                each.sequence, each.first, [as_logprob(token, next(rows), each.top) for token in each.targets]
            )
            for each in self.asked
        ]


Row = tuple[float, list[int], list[float]]


def listed(own: Tensor, ids: Tensor | None, others: Tensor | None) -> Iterator[Row]:
    """Row by row: a token's log-probability, the likeliest ids, and theirs."""
    values = own.tolist()
    empty: list[list] = [[]] * len(values)
    tops = empty if ids is None or others is None else ids.tolist()
    return zip(values, tops, empty if others is None else others.tolist(), strict=True)


def as_logprob(token: int, row: Row, top: int) -> Logprob:
    own, ids, others = row
    return Logprob(token, own, tuple(zip(ids[:top], others[:top], strict=True)))
