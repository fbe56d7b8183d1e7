"""The scheduler: continuous batching with chunked prefill under one token budget a step.

**Order.** Every sequence has a rank that never changes: rank = (step of arrival + AGEING · priority, arrival). So a
level of priority is worth AGEING steps of waiting: a request is overtaken only by those that arrive within AGEING ·
(difference of priorities) steps after it, which are finitely many.

**A step.** First the running sequences: each decoding one takes one token, then running prefills take the rest of the
budget. Then waiting sequences are admitted by rank while blocks, slots and budget last; a long prompt is cut to the
remaining budget (chunked prefill). None is admitted past a sequence that does not fit yet.

**Long contexts.** The same number of tokens takes longer the more keys they attend to. While others decode, prompts
also share a budget of work, so that no step takes longer than one with the first `max_batch_tokens` tokens of a prompt.
An eighth of these tokens may always be taken: fewer do not fill a GPU, and take as long.

**Shared prefixes.** Full blocks can be shared from the step on that computes them, by prompts admitted after it: in
each layer a step writes all its keys and values before it reads any. Equal prefixes that arrive together are computed
once.

**Preemption.** An admitted sequence is allocated the blocks of all its tokens at once; blocks for its output are
allocated one by one. When none is free, the running sequence with the highest rank is preempted: its blocks are freed
and it waits to be recomputed. A request of higher priority also preempts running ones of lower priority and higher
rank.

**No starvation.** The unfinished sequence with the smallest rank is never preempted and never waits behind another, and
alone it fits the pool (requests that do not are rejected), so it finishes; then the next is the smallest. The blocks of
a preempted sequence stay in the prefix cache until they are reused.

**n > 1.** The answers of a request share their prompt: the first computes it; the others wait for that, share its full
blocks, and recompute only the last prompt token, for the logits of their own first token.
"""

from __future__ import annotations

import bisect
import heapq
import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from ...spec import EngineSpec
from .block_events import PrefixTiers
from .block_manager import BlockManager
from .request import PLACEHOLDER_TOKEN, Sequence, SequenceStatus

AGEING = 256  # steps of waiting that one level of priority is worth
MIN_CHUNK_PART = 8  # of the tokens of a step
RANK, DRAFT_TOKENS = attrgetter("rank"), attrgetter("draft_tokens")


@dataclass(slots=True)
class Chunk:
    """Compute tokens[start : start + count]; the logits of the last `num_logits` positions are needed.

    num_logits: 0 while more of the prompt follows, usually 1; with draft tokens count = num_logits = 1 + draft tokens,
    and the inputs are tokens[start] followed by the sequence's draft tokens.
    """

    sequence: Sequence
    start: int
    count: int
    num_logits: int

    @property
    def output_index(self) -> int:
        """Index, among the sequence's tokens, of the first token that this chunk samples."""
        return self.start + self.count - max(self.num_logits - 1, 0)


@dataclass(frozen=True)
class Step:
    """Chunks of one token come first. `copies`: blocks to copy, from → to, before the forward pass."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def tokens(self) -> int:
        return sum([chunk.count for chunk in self.chunks])

    @cached_property
    def rows(self) -> int:
        """Positions that need logits."""
        return sum([chunk.num_logits for chunk in self.chunks])

    @cached_property
    def sampling_chunks(self) -> list[Chunk]:
        return self.chunks if self.decode_only else [chunk for chunk in self.chunks if chunk.num_logits]

    @cached_property
    def slots(self) -> np.ndarray:
        """(chunks) int64: the slots of their sequences, when first asked for: before any of them is freed."""
        return np.array([chunk.sequence.slot for chunk in self.chunks], np.int64)

    @cached_property
    def sampling_slots(self) -> np.ndarray:
        """(sampling chunks) int64."""
        return self.slots if self.decode_only else self.slots[[chunk.num_logits > 0 for chunk in self.chunks]]

    @property
    def decode_only(self) -> bool:
        """Whether there is no prefill: every token needs logits."""
        return self.tokens == self.rows

    @property
    def single_tokens(self) -> bool:
        """Whether every chunk is a decode of one token."""
        return self.tokens == self.rows == len(self.chunks)


@dataclass
class StepBudget:
    """What a step has left. Work is in units of one token's products: a token at position p takes 1 + p / context.

    `context`: keys whose attention takes as long as the products of one token.
    """

    tokens: int
    context: float
    work: float = math.inf
    least: int = 1  # tokens of a chunk whose work is more than what is left

    def limit_work(self) -> None:
        """To that of a prompt's first tokens, as many as are left."""
        self.work = self.tokens + self.tokens**2 / (2 * self.context)
        self.least = max(1, self.tokens // MIN_CHUNK_PART)

    @property
    def spent(self) -> bool:
        return not self.tokens or self.work < 1

    def take_prefill(self, sequence: Sequence) -> Chunk:
        """As many of the tokens left to compute as the budget allows."""
        start = sequence.num_computed_tokens
        missing = len(sequence.tokens) - start
        count = min(missing, self.tokens, self.most_tokens(start))
        self.tokens -= count
        self.work -= count + count * (start + count / 2) / self.context
        return Chunk(sequence, start, count, int(count == missing))

    def most_tokens(self, start: int) -> int:
        """Tokens from position `start` on whose work is left, and no fewer than `least`."""
        if math.isinf(self.work) or math.isinf(self.context):
            return self.tokens
        first = 1 + start / self.context
        return max(self.least, int(self.context * (math.sqrt(first**2 + 2 * self.work / self.context) - first)))


class Scheduler:
    def __init__(
        self, spec: EngineSpec, blocks: int, tiers: PrefixTiers | None = None, context_of_token: float = math.inf
    ) -> None:
        """`spec`: resolved; `blocks`: of the pool; `context_of_token`: as `StepBudget.context`."""
        self.spec, self.tiers, self.context_of_token = spec, tiers, context_of_token
        self.block_manager = BlockManager(blocks, spec.block, spec.prefix_cache)
        self.block_manager.listeners += [] if tiers is None else [tiers]
        self.watermark = blocks // 100  # blocks that stay free at admission, as running sequences will need some soon
        self.waiting: list[Sequence] = []  # both ordered by rank
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []  # in the latest step
        self.slots = list(range(spec.max_seqs))  # a heap: the lowest is allocated first, so that tables stay dense
        self.steps = 0
        self.arrivals = 0
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache, and found
        self.prefix_hits = 0
        self.tier_queries = 0  # tokens that the device did not have, looked up in the tiers, and found
        self.tier_hits = 0

    def add(self, sequences: list[Sequence]) -> None:
        """Queue the sequences of one request."""
        self.arrivals += 1
        for each in sequences:
            each.rank = (self.steps + AGEING * each.request.priority, self.arrivals, each.index)
            bisect.insort(self.waiting, each, key=RANK)
        self.begin_fetch(sequences[0])

    def begin_fetch(self, sequence: Sequence) -> None:
        if self.tiers is not None and self.may_match_prefix(sequence):
            matched = self.block_manager.find_cached_prefix(sequence)
            self.tiers.begin_fetch(sequence, self.block_manager.prefix_hashes(sequence), len(matched))

    def is_fetching(self) -> bool:
        """Whether a sequence waits for its blocks."""
        return self.tiers is not None and any(map(self.tiers.is_fetching, self.waiting))

    def wait_for_fetch(self, seconds: float) -> None:
        if self.tiers is not None:
            self.tiers.wait(seconds)

    def finish(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence that has finished."""
        if sequence.state is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.release(sequence)
        elif sequence.state is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            if self.tiers is not None:
                self.tiers.end_fetch(sequence)
        sequence.state = SequenceStatus.FINISHED

    def release(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        heapq.heappush(self.slots, sequence.slot)
        sequence.slot = -1

    def schedule(self) -> Step:
        """The next step; sequences are updated as if it had been launched."""
        self.steps += 1
        self.admitted = []
        self.preempt_for()
        before = self.preemptions
        chunks, budget = self.schedule_running()
        copies: list[tuple[int, int]] = []
        if self.preemptions == before:
            self.admit_waiting(chunks, copies, budget)
        block_size = self.block_manager.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = end = chunk.start + chunk.count
            if chunk.num_logits:
                sequence.tokens.append(PLACEHOLDER_TOKEN)
            if end // block_size > sequence.num_cached_blocks:
                self.block_manager.cache_full_blocks(sequence, end)
        step = Step(chunks, copies)
        if step.tokens > len(chunks):
            chunks.sort(key=lambda chunk: chunk.count > 1)
        return step

    def schedule_running(self) -> tuple[list[Chunk], StepBudget]:
        """Chunks of the running sequences, and the remaining budget."""
        budget = StepBudget(self.spec.max_batch_tokens, self.context_of_token)
        chunks: list[Chunk] = []
        drafting = any(map(DRAFT_TOKENS, self.running))
        # Draft tokens take neither the blocks nor the budget that sampled tokens of later sequences need.
        owed = sum(map(self.needs_block, self.running)) if drafting else 0
        others = sum(map(is_decoding, self.running)) if drafting else 0
        block_size = self.block_manager.block_size
        prefilling = False
        for sequence in list(self.running):
            start, count = sequence.num_computed_tokens, 1
            if len(sequence.tokens) > start + 1:
                prefilling = True
            elif start + 1 < sequence.limit and budget.tokens and sequence.state is SequenceStatus.RUNNING:
                if drafting:
                    owed -= self.needs_block(sequence)
                    others -= 1
                    count += self.trim_draft_tokens(sequence, budget.tokens - 1 - others, owed)
                # Only the first token of a block, or draft tokens, can need another block.
                if (start % block_size and count == 1) or self.allocate_slots(sequence, start + count):
                    chunks.append(Chunk(sequence, start, count, count))
                    budget.tokens -= count
        if chunks:
            budget.limit_work()
        for sequence in self.running if prefilling else ():
            if not budget.spent and len(sequence.tokens) - sequence.num_computed_tokens > 1:
                chunks.append(self.prefill(sequence, budget))
        return chunks, budget

    def prefill(self, sequence: Sequence, budget: StepBudget) -> Chunk:
        chunk = budget.take_prefill(sequence)
        self.block_manager.cache_full_blocks(sequence, chunk.start + chunk.count)
        return chunk

    def admit_waiting(self, chunks: list[Chunk], copies: list[tuple[int, int]], budget: StepBudget) -> None:
        """Admit by rank while there is room. Nothing is freed from here on, so that copied blocks stay in place."""
        for sequence in list(self.waiting):
            if budget.spent or not self.slots or sequence.num_known_tokens < len(sequence.tokens):
                break
            siblings = [] if sequence.skip_prefix_cache else running_siblings(sequence)
            parent = next(
                (s for s in siblings if s.num_computed_tokens >= s.num_prompt_tokens and s not in self.admitted), None
            )
            if siblings and parent is None:
                continue  # the prompt is being computed, and can be shared afterwards
            if self.tiers is not None and self.tiers.is_fetching(sequence):
                continue  # others need not wait for its blocks
            if not (self.fork_from(sequence, parent, copies) if parent else self.allocate_prompt(sequence)):
                break
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=RANK)
            sequence.state = SequenceStatus.RUNNING
            sequence.slot = heapq.heappop(self.slots)
            self.admitted.append(sequence)
            chunks.append(self.prefill(sequence, budget))

    def allocate_prompt(self, sequence: Sequence) -> bool:
        """Allocate blocks for all its tokens, cached prefix included; false if there are too few."""
        manager = self.block_manager
        matched = self.find_cached_prefix(sequence)
        if not self.can_allocate(self.free_blocks_needed(sequence, matched)):
            return False
        manager.add_reference(matched)
        sequence.blocks = matched + manager.allocate(manager.blocks_for(sequence.num_known_tokens) - len(matched))
        sequence.num_cached_blocks = len(matched)
        found = len(matched) + self.load_from_tiers(sequence, len(matched))
        sequence.num_computed_tokens = sequence.num_shared_tokens = found * manager.block_size
        if manager.prefix_cache:
            self.prefix_queries += sequence.num_known_tokens
            self.prefix_hits += len(matched) * manager.block_size
        if not sequence.preempted and not sequence.index:
            sequence.request.cached_tokens = sequence.num_computed_tokens
        return True

    def load_from_tiers(self, sequence: Sequence, matched: int) -> int:
        """Blocks that follow those of the device's prefix cache; they are loaded before the step."""
        if self.tiers is None or not self.may_match_prefix(sequence):
            return 0
        digests = self.block_manager.prefix_hashes(sequence)[matched:]
        loaded = self.tiers.load(sequence, digests, sequence.blocks[matched:])
        self.tier_queries += len(digests) * self.block_manager.block_size
        self.tier_hits += loaded * self.block_manager.block_size
        return loaded

    def fork_from(self, sequence: Sequence, parent: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Share the prompt of another sequence of the same request; false if there are too few blocks."""
        manager = self.block_manager
        start = min(sequence.num_prompt_tokens, sequence.num_known_tokens - 1)
        if not self.can_allocate(manager.blocks_for(sequence.num_known_tokens) - start // manager.block_size):
            return False
        sequence.blocks, copied = manager.fork(parent, start)
        copies += copied
        sequence.blocks += manager.allocate(manager.blocks_for(sequence.num_known_tokens) - len(sequence.blocks))
        sequence.num_computed_tokens = sequence.num_shared_tokens = start
        return True

    def may_match_prefix(self, sequence: Sequence) -> bool:
        # prompt_logprobs need the logits of the whole prompt, and a mean its states: no block may be skipped.
        whole = sequence.skip_prefix_cache or sequence.params.prompt_logprobs is not None
        return not whole and sequence.request.pooling != "mean"

    def find_cached_prefix(self, sequence: Sequence) -> list[int]:
        return self.block_manager.find_cached_prefix(sequence) if self.may_match_prefix(sequence) else []

    def free_blocks_needed(self, sequence: Sequence, matched: list[int]) -> int:
        """Blocks that it would take off the free list: new ones, and cached ones that nobody holds."""
        lacking = self.block_manager.blocks_for(sequence.num_known_tokens) - len(matched)
        return lacking + sum(not self.block_manager.ref_counts[block] for block in matched)

    def can_allocate(self, num_blocks: int) -> bool:
        return self.block_manager.num_free_blocks >= num_blocks + (self.watermark if self.running else 0)

    def trim_draft_tokens(self, sequence: Sequence, token_budget: int, owed: int) -> int:
        """Keep as many draft tokens as fit the step. Blocks owed to sampled tokens stay, so nothing is preempted."""
        if not sequence.draft_tokens:
            return 0
        room = (len(sequence.blocks) + self.block_manager.num_free_blocks - owed) * self.block_manager.block_size - len(
            sequence.tokens
        )
        most = min(token_budget, room, sequence.limit - len(sequence.tokens) - 1)
        sequence.draft_tokens = sequence.draft_tokens[: max(most, 0)]
        return len(sequence.draft_tokens)

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the next token needs another block."""
        return sequence.num_computed_tokens >= len(sequence.blocks) * self.block_manager.block_size

    def allocate_slots(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate blocks for so many tokens, preempting others if need be; false if it was preempted itself."""
        missing = self.block_manager.blocks_for(tokens) - len(sequence.blocks)
        while self.block_manager.num_free_blocks < missing:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.block_manager.allocate(missing)
        return True

    def preempt_for(self) -> None:
        """Preempt running sequences of lower priority for the head of the queue, if that frees enough blocks."""
        if not self.waiting or running_siblings(head := self.waiting[0]):
            return
        behind: list[Sequence] = []
        for each in reversed(self.running):
            if each.rank < head.rank or each.request.priority <= head.request.priority:
                break
            behind.append(each)
        if not behind:
            return
        theirs = sum(self.block_manager.ref_counts[block] == 1 for each in behind for block in each.blocks)
        if (
            self.free_blocks_needed(head, self.find_cached_prefix(head)) + self.watermark
            > self.block_manager.num_free_blocks + theirs
        ):
            return
        for each in behind:
            if self.slots and self.can_allocate(self.free_blocks_needed(head, self.find_cached_prefix(head))):
                return
            self.preempt(each)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old rank; its tokens are kept and recomputed."""
        self.running.remove(sequence)
        self.release(sequence)
        sequence.state = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.draft_tokens = []
        sequence.preempted += 1
        self.preemptions += 1
        bisect.insort(self.waiting, sequence, key=RANK)

    def recompute_uncached(self, sequence: Sequence) -> None:
        """Recompute all known tokens without the prefix cache; tokens sampled since are dropped."""
        sequence.skip_prefix_cache = True
        del sequence.tokens[sequence.num_known_tokens :]
        if sequence.state is SequenceStatus.RUNNING:
            self.preempt(sequence)


def is_decoding(sequence: Sequence) -> bool:
    """Whether only its latest token is left to compute, and another one may follow."""
    return len(sequence.tokens) == sequence.num_computed_tokens + 1 < sequence.limit


def running_siblings(sequence: Sequence) -> list[Sequence]:
    """Other sequences of the same request that are running."""
    return [
        each for each in sequence.request.sequences if each.state is SequenceStatus.RUNNING and each is not sequence
    ]
