"""The outputs of a step: sampled tokens, and log-probabilities where they were requested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ...model.gpt import GPT
from .request import Logprob, Request, Sequence
from .sampler import SamplerOutput, top_k_logprobs
from .scheduler import Chunk

LOGITS_AT_ONCE = 2**25  # elements of one chunk of a prompt's logits: 128 MiB in fp32


@dataclass(frozen=True)
class StepTokens:
    """Sampled tokens of the chunks of a step that sample, concatenated; padding may follow."""

    tokens: list[int]
    logprobs: list[Logprob]  # of each token; empty if no sequence needs any
    counts: list[int] | None = None  # tokens of each chunk: several where draft tokens were right; None: one each
    bad: frozenset[int] = frozenset()  # chunks with invalid tokens: logits not finite, or no token allowed


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, from index `first` on."""

    sequence: Sequence
    first: int
    logprobs: list[Logprob]


@dataclass(frozen=True)
class PromptLogprobsQuery:
    """Positions of one chunk whose next prompt token needs a log-probability: flat indices `at` … `at + count`."""

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
        left = sequence.num_prompt_tokens - 1 - chunk.start
        if left > 0 and sequence.params.prompt_logprobs is not None:
            prompt_queries.append(PromptLogprobsQuery(sequence, chunk.start + 1, at, min(chunk.count, left)))
        at += chunk.count
    return prompt_queries


def prompt_logprobs(
    model: GPT, valid: int, states: Tensor, prompt_queries: list[PromptLogprobsQuery], invariant: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of all queries, concatenated: log-probabilities (positions), top ids (below `valid`) and their log-probabilities.

    `invariant`: row by row, as the order of a reduction may depend on the number of rows.
    """
    positions = to_device_async(
        [position for each in prompt_queries for position in range(each.at, each.at + each.count)], states.device
    )
    targets = to_device_async([token for each in prompt_queries for token in each.targets], states.device)
    top = max(each.top for each in prompt_queries)
    results = []
    for some, wanted in zip(
        split_by_logits_memory(positions, model), split_by_logits_memory(targets, model), strict=True
    ):
        logits = model.logits(states[some]).float()
        each = 1 if invariant else len(logits)
        for part, targets_of_it in zip(logits.split(each), wanted.split(each), strict=True):
            own = part.gather(1, targets_of_it.unsqueeze(1)).squeeze(1) - part.logsumexp(dim=1)
            results.append((own, *(top_k_logprobs(part, valid, top) if top else (own, own))))
    own, ids, others = (torch.cat(part) for part in zip(*results, strict=True))
    return (own, ids, others) if top else (own, None, None)


# --- hidden states of prompts as one vector -----------------------------------------------------------------


@dataclass(frozen=True)
class PoolingQuery:
    """States of one chunk of a prompt: flat indices `at` … `at + count`, of which the sum is wanted."""

    request: Request
    first: bool  # the chunk begins the prompt
    at: int
    count: int


def pooling_queries(chunks: list[Chunk]) -> list[PoolingQuery]:
    found, at = [], 0
    for chunk in chunks:
        sequence, pooling = chunk.sequence, chunk.sequence.request.pooling
        count = min(chunk.count, sequence.num_prompt_tokens - chunk.start)
        if pooling is not None and count > 0 and not sequence.index:
            if pooling == "mean":
                found.append(PoolingQuery(sequence.request, chunk.start == 0, at, count))
            elif chunk.start + count == sequence.num_prompt_tokens:
                found.append(PoolingQuery(sequence.request, True, at + count - 1, 1))
        at += chunk.count
    return found


def pooled_states(model: GPT, states: Tensor, queries: list[PoolingQuery]) -> Tensor:
    """(queries, hidden) float32: of states behind the last norm, as `transformers` has them. (queries, 1) with a scalar
    head, its values.
    """
    assert model.norm is not None
    if model.score is not None:
        last = torch.stack([states[each.at + each.count - 1] for each in queries])
        return model.values(model.norm(last), model.score).unsqueeze(1)
    sums = [model.norm(states[each.at : each.at + each.count]).float().sum(dim=0) for each in queries]
    return torch.stack(sums)


def record_pooled(request: Request, first: bool, state: list[float]) -> None:
    """A prompt that is recomputed after a preemption begins anew."""
    before = None if first else request.pooled
    request.pooled = state if before is None else [a + b for a, b in zip(before, state, strict=True)]


def to_device_async(numbers: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Copy integers to the device without synchronising."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def split_by_logits_memory(rows: Tensor, model: GPT) -> tuple[Tensor, ...]:
    """Splits whose logits fit LOGITS_AT_ONCE."""
    return rows.split(max(1, LOGITS_AT_ONCE // model.spec.vocab))


@dataclass(frozen=True)
class AsyncStepOutput:
    """The output of a launched step. Its tensors are on the host once `arrived` is recorded."""

    chunks: list[Chunk]  # those that sample
    sampled: SamplerOutput | None
    prompt_queries: list[PromptLogprobsQuery]
    prompt: tuple[Tensor, Tensor | None, Tensor | None] | None
    draft_tokens: Tensor | None  # (rows): the draft token that each row verifies, if any
    pooling: list[PoolingQuery]
    pooled: Tensor | None  # (pooling, hidden), or (pooling, 1)
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()

    def read(self) -> StepTokens:
        """Waits for the device."""
        self.wait()
        if self.sampled is None:
            return StepTokens([], [])
        tokens, bad = self.sampled.tokens.tolist(), frozenset(np.flatnonzero(self.sampled.bad).tolist())
        logprobs = sampled_logprobs(tokens, self.sampled, self.chunks)
        if self.draft_tokens is None:  # a row for each chunk; padding behind them
            return StepTokens(tokens, logprobs, None, bad)
        return self.verified(tokens, logprobs, bad, self.draft_tokens.tolist())

    def verified(
        self, tokens: list[int], logprobs: list[Logprob], bad: frozenset[int], draft_tokens: list[int]
    ) -> StepTokens:
        """Of each chunk its first row, and rows after a draft token that the row before has sampled too."""
        valid: list[int] = []  # rows
        counts, bad_chunks, row = [], [], 0
        for index, chunk in enumerate(self.chunks):
            end = row + 1
            while end < row + chunk.num_logits and tokens[end - 1] == draft_tokens[end - 1] and end - 1 not in bad:
                end += 1
            valid += range(row, end)
            counts.append(end - row)
            if not bad.isdisjoint(range(row, end)):
                bad_chunks.append(index)
            row += chunk.num_logits
        return StepTokens(
            [tokens[i] for i in valid], [logprobs[i] for i in valid if logprobs], counts, frozenset(bad_chunks)
        )

    def pooled_states(self) -> list[tuple[Request, bool, list[float]]]:
        """Of requests with `pooling`. Waits for the device."""
        self.wait()
        if self.pooled is None:
            return []
        return [(each.request, each.first, row) for each, row in zip(self.pooling, self.pooled.tolist(), strict=True)]

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """The prompt log-probabilities that this step computed. Waits for the device."""
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


def sampled_logprobs(tokens: list[int], sampled: SamplerOutput, chunks: list[Chunk]) -> list[Logprob]:
    """Row by row, with as many of the likeliest tokens as its sequence needs; empty if none needs any."""
    if sampled.logprob is None:
        return []
    if sampled.top_ids is None:
        # As Logprob(token, value), without a Python call for each of many tokens.
        return list(
            map(tuple.__new__, repeat(Logprob), zip(tokens, sampled.logprob.tolist(), repeat(()), strict=False))
        )
    rows = logprob_rows(sampled.logprob, sampled.top_ids, sampled.top_logprobs)
    tops = [chunk.sequence.top_logprobs or 0 for chunk in chunks for _ in range(chunk.num_logits)]
    return [to_logprob(*each) for each in zip(tokens, rows, tops, strict=True)]


Row = tuple[float, list[int], list[float]]


def logprob_rows(own: Tensor, ids: Tensor | None, others: Tensor | None) -> Iterator[Row]:
    """Row by row: a token's log-probability, the top ids, and their log-probabilities."""
    values = own.tolist()
    empty: list[list] = [[]] * len(values)
    tops = empty if ids is None or others is None else ids.tolist()
    return zip(values, tops, empty if others is None else others.tolist(), strict=True)


def to_logprob(token: int, row: Row, top: int) -> Logprob:
    own, ids, others = row
    return Logprob(token, own, tuple(zip(ids[:top], others[:top], strict=True)) if top else ())
