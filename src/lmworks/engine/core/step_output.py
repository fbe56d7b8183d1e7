"""What a step brings back: tokens of the sequences that wanted one, and log-probabilities where they were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.gpt import GPT
from .request import Logprob, Sequence
from .sampler import SamplerOutput, top_k_logprobs
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
class PromptLogprobsQuery:
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


def prompt_logprobs_queries(chunks: list[Chunk]) -> list[PromptLogprobsQuery]:
    prompt_queries, at = [], 0
    for chunk in chunks:
        sequence = chunk.sequence
        count = min(chunk.count, sequence.prompt - 1 - chunk.start)
        if sequence.params.prompt_logprobs is not None and count > 0:
            prompt_queries.append(PromptLogprobsQuery(sequence, chunk.start + 1, at, count))
        at += chunk.count
    return prompt_queries


def prompt_logprobs(
    model: GPT, valid: int, states: Tensor, prompt_queries: list[PromptLogprobsQuery], invariant: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of all that is asked, one after another: (positions), and the likeliest ids (below `valid`) and theirs.

    `invariant`: row by row, for the order of sums over a row of logits may depend on how many rows there are.
    """
    places = to_device_async(
        [place for each in prompt_queries for place in range(each.at, each.at + each.count)], states.device
    )
    targets = to_device_async([token for each in prompt_queries for token in each.targets], states.device)
    top = max(each.top for each in prompt_queries)
    results = []
    for some, wanted in zip(split_by_logits_memory(places, model), split_by_logits_memory(targets, model), strict=True):
        logits = model.logits(states[some]).float()
        each = 1 if invariant else len(logits)
        for part, targets_of_it in zip(logits.split(each), wanted.split(each), strict=True):
            own = part.gather(1, targets_of_it.unsqueeze(1)).squeeze(1) - part.logsumexp(dim=1)
            results.append((own, *(top_k_logprobs(part, valid, top) if top else (own, own))))
    own, ids, others = (torch.cat(part) for part in zip(*results, strict=True))
    return (own, ids, others) if top else (own, None, None)


def to_device_async(numbers: list[int], device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def split_by_logits_memory(rows: Tensor, model: GPT) -> tuple[Tensor, ...]:
    """As many rows at once as their logits may take."""
    return rows.split(max(1, LOGITS_AT_ONCE // model.spec.vocab))


@dataclass(frozen=True)
class AsyncStepOutput:
    """A step on its way. Its tensors are on the host once `arrived` has happened."""

    chunks: list[Chunk]  # those that pick tokens
    sampled: SamplerOutput | None
    prompt_queries: list[PromptLogprobsQuery]
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
        logprobs = None if sampled.logprob is None else list(logprob_rows(sampled.logprob, *sampled[2:4]))
        draft_tokens = [] if self.draft_tokens is None else self.draft_tokens.tolist()
        token_output, row = [], 0
        for chunk in self.chunks:
            end = row + 1
            # A row speaks of the place after a guess: it counts only where the row before agreed with that guess.
            while end < row + chunk.wanted and tokens[end - 1] == draft_tokens[end - 1] and not bad[end - 1]:
                end += 1
            params = chunk.sequence.params
            found = None
            if logprobs is not None and params.needs_logprobs:
                found = [to_logprob(tokens[i], logprobs[i], params.logprobs or 0) for i in range(row, end)]
            token_output.append(TokenOutput(tokens[row:end], found, any(bad[row:end])))
            row += chunk.wanted
        return token_output

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """What this step computed of prompts whose log-probabilities are asked for. Waits for the device."""
        self.wait()
        if self.prompt is None:
            return []
        rows = logprob_rows(*self.prompt)
        return [
            PromptLogprobs(
                each.sequence, each.first, [to_logprob(token, next(rows), each.top) for token in each.targets]
            )
            for each in self.prompt_queries
        ]


Row = tuple[float, list[int], list[float]]


def logprob_rows(own: Tensor, ids: Tensor | None, others: Tensor | None) -> Iterator[Row]:
    """Row by row: a token's log-probability, the likeliest ids, and theirs."""
    values = own.tolist()
    empty: list[list] = [[]] * len(values)
    tops = empty if ids is None or others is None else ids.tolist()
    return zip(values, tops, empty if others is None else others.tolist(), strict=True)


def to_logprob(token: int, row: Row, top: int) -> Logprob:
    own, ids, others = row
    return Logprob(token, own, tuple(zip(ids[:top], others[:top], strict=True)))
