"""A device without a network: what it computes shows every mistake in the books of blocks.

A cell of the cache holds a hash of all that its position can see, read through the block table, as keys and values of
a real network do. The next token is a hash of the seed and of all cells. One wrong block, one block written too early,
and every token after it is another one. Steps are computed only when they are read, in order, from what the host said
when they were launched: as late as a real device may.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Logprob, Request, Sequence
from lmworks.engine.core.scheduler import Step
from lmworks.engine.core.step_output import PromptLogprobs, StepTokens
from lmworks.engine.grammars.grammar import Grammars
from lmworks.spec import EngineSpec

EMPTY = 0


def mix(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def alone(prompt: list[int], seed: int, count: int, vocab: int, ends: tuple[int, ...] = ()) -> list[int]:
    """What a sequence comes to with nobody else around and no cache at all."""
    cells: list[int] = []
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not (len(tokens) > len(prompt) and tokens[-1] in ends):
        for position in range(len(cells), len(tokens)):
            cells.append(mix(tokens[position], position, *cells))
        tokens.append(mix(seed, *cells) % vocab)
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Work:
    """One chunk as the device was told of it."""

    slot: int
    seed: int
    tokens: list[int]
    start: int
    num_logits: int
    table: list[int]
    bad: bool


@dataclass(frozen=True)
class TokenOutput:
    """Of one chunk."""

    tokens: list[int]
    logprobs: list[Logprob] = field(default_factory=list)
    bad: bool = False


@dataclass
class StepOutput:
    device: FakeDevice
    works: list[Work]
    copies: list[tuple[int, int]]
    picks: list[TokenOutput] | None = None

    def read(self) -> StepTokens:
        self.device.run_until(self)
        assert self.picks is not None
        return StepTokens(
            [token for each in self.picks for token in each.tokens],
            [one for each in self.picks for one in each.logprobs],
            [len(each.tokens) for each in self.picks],
            frozenset(index for index, each in enumerate(self.picks) if each.bad),
        )

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def pooled_states(self) -> list[tuple[Request, bool, list[float]]]:
        return []


@dataclass
class FakeDevice:
    spec: EngineSpec
    valid_vocab: int = 50
    hidden: int = 8
    synchronous: bool = False
    bad_seeds: set[int] = field(default_factory=set)  # sequences whose logits are not finite
    grammars: Grammars | None = None
    scalar_head: bool = False
    context_of_token: float = math.inf

    def __post_init__(self) -> None:
        self.blocks = self.spec.blocks
        self.cache = [[EMPTY] * self.spec.block for _ in range(self.blocks)]
        self.recent = [PLACEHOLDER_TOKEN] * self.spec.max_seqs
        self.queue: list[StepOutput] = []
        self.steps: list[Step] = []

    def admit(self, sequence: Sequence) -> None:
        assert 0 <= sequence.slot < self.spec.max_seqs
        assert PLACEHOLDER_TOKEN not in sequence.tokens[: sequence.num_known_tokens]

    def launch(self, step: Step) -> StepOutput:
        assert 0 < step.tokens <= self.spec.max_batch_tokens
        assert len(step.chunks) <= self.spec.max_seqs
        counts = [chunk.count for chunk in step.chunks]
        assert counts == sorted(counts, key=lambda count: count > 1), "chunks of one token come first"
        works = []
        for chunk in step.chunks:
            sequence, start, count = chunk.sequence, chunk.start, chunk.count
            tokens = sequence.tokens[start : start + count]
            if chunk.num_logits > 1:
                tokens = [sequence.tokens[start], *sequence.draft_tokens]
            assert len(tokens) == count
            bad = sequence.seed in self.bad_seeds
            works.append(
                Work(sequence.slot, sequence.seed, tokens, start, chunk.num_logits, list(sequence.blocks), bad)
            )
        self.steps.append(step)
        self.queue.append(launched := StepOutput(self, works, list(step.copies)))
        return launched

    def add_adapter(self, name: str, folder: Path) -> None:
        pass

    def remove_adapter(self, name: str) -> None:
        pass

    def sleep(self) -> int:
        return 0

    def wake(self) -> int:
        return 0

    def failed_worker(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def run_until(self, launched: StepOutput) -> None:
        while launched.picks is None:
            first = self.queue.pop(0)
            for source, target in first.copies:
                self.cache[target] = list(self.cache[source])
            # All keys are written before any are read, as within a layer of a real step; earlier positions first, as a
            # chunk may share blocks that another one computes.
            tokens = [[self.recent[w.slot] if t == PLACEHOLDER_TOKEN else t for t in w.tokens] for w in first.works]
            for work, ids in sorted(zip(first.works, tokens, strict=True), key=lambda pair: pair[0].start):
                self.write(work, ids)
            first.picks = [
                self.pick(work, ids) for work, ids in zip(first.works, tokens, strict=True) if work.num_logits
            ]

    def cells(self, work: Work, length: int) -> list[int]:
        size = self.spec.block
        return [self.cache[work.table[position // size]][position % size] for position in range(length)]

    def write(self, work: Work, tokens: list[int]) -> None:
        size = self.spec.block
        for position, token in enumerate(tokens, start=work.start):
            cell = mix(token, position, *self.cells(work, position))
            self.cache[work.table[position // size]][position % size] = cell

    def pick(self, work: Work, tokens: list[int]) -> TokenOutput:
        """The next token; with guesses, also those after each guess that was right."""
        picked: list[int] = []
        first = work.start + len(tokens) - work.num_logits + 1
        for i in range(work.num_logits):
            picked.append(mix(work.seed, *self.cells(work, first + i)) % self.valid_vocab)
            if i + 1 < work.num_logits and tokens[len(tokens) - work.num_logits + 1 + i] != picked[-1]:
                break
        self.recent[work.slot] = picked[-1]
        logprobs = [Logprob(token, -float(token) / 10) for token in picked]
        return TokenOutput(picked, logprobs, work.bad)
