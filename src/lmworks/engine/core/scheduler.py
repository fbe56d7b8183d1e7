"""The scheduler: continuous batching with chunked prefill under one budget of tokens a step.

**Order.** Every sequence has a rank, and ranks never change: rank = (step of arrival + AGEING · priority, arrival).
So a level of priority is worth AGEING steps of waiting, no more: a request is overtaken only by those that arrive
within AGEING · (difference of priorities) steps after it, which are finitely many.

**A step.** First the running sequences: those that decode take one token each, then prefills that are under way take
what is left of the budget. Then waiting ones are admitted by rank while blocks, slots and budget last; a long prompt is
cut to what is left (chunked prefill). None is admitted past a sequence that does not fit yet.

**Preemption.** A sequence that is admitted gets the blocks of all its tokens at once; blocks for its answer come one by
one. When there are none left, the running sequence with the highest rank is preempted: it gives up its blocks and waits
to be computed again. An urgent request also preempts running ones that are both less urgent and of higher rank.

**No starvation.** The unfinished sequence with the smallest rank is never preempted and never waits behind another,
and alone it fits the pool (requests that do not are refused), so it finishes; then the next is the smallest. What a
preempted sequence had is found in the prefix cache as long as nobody needed the room.

**Several answers** share their prompt: the first computes it, the others wait for that, take its full blocks, and
compute only the last token of the prompt again, for their own first pick.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field
from operator import attrgetter

from ...spec import EngineSpec
from .block_manager import BlockPool
from .request import PLACEHOLDER_TOKEN, Sequence, SequenceStatus

AGEING = 256  # steps of waiting that one level of priority is worth
RANK = attrgetter("rank")


@dataclass(frozen=True)
class Chunk:
    """Compute tokens[start : start + count]; the logits of the last `wanted` positions are needed.

    wanted: 0 while more of the prompt follows, 1 as a rule; with guesses count = wanted = 1 + guesses, and the tokens
    are tokens[start] followed by the sequence's guesses.
    """

    sequence: Sequence
    start: int
    count: int
    wanted: int

    @property
    def place(self) -> int:
        """Index among the sequence's tokens of the first one that this chunk picks."""
        return self.start + self.count - max(self.wanted - 1, 0)


@dataclass(frozen=True)
class Step:
    """Chunks of one token come first. `copies` are blocks to copy, from → to, before anything is computed."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    def __init__(self, spec: EngineSpec, blocks: int) -> None:
        """`spec` with its zeros filled in; `blocks` in the pool."""
        self.spec = spec
        self.pool = BlockPool(blocks, spec.block, spec.prefix_cache)
        self.watermark = blocks // 100  # left free when others are let in: those that run will want blocks soon
        self.waiting: list[Sequence] = []  # both by rank
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []  # in the latest step
        self.slots = list(range(spec.max_seqs))  # a heap: the lowest is given first, so that tables stay dense
        self.steps = 0
        self.arrivals = 0
        self.preemptions = 0
        self.prefix_queries = 0  # tokens that were looked up, and found, in the prefix cache
        self.prefix_hits = 0

    def add(self, sequences: list[Sequence]) -> None:
        """The answers of one request."""
        self.arrivals += 1
        for each in sequences:
            each.rank = (self.steps + AGEING * each.request.priority, self.arrivals, each.index)
            bisect.insort(self.waiting, each, key=RANK)

    def finish(self, sequence: Sequence) -> None:
        """It has ended, in whatever way: what it held is free."""
        if sequence.state is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.release(sequence)
        elif sequence.state is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceStatus.FINISHED

    def release(self, sequence: Sequence) -> None:
        self.pool.release(sequence)
        heapq.heappush(self.slots, sequence.slot)
        sequence.slot = -1

    def schedule(self) -> Step:
        """The next step; the sequences are then as if it had been launched."""
        self.steps += 1
        self.admitted = []
        self.preempt_for()
        before = self.preemptions
        chunks, left = self.schedule_running()
        copies: list[tuple[int, int]] = []
        if self.preemptions == before:
            self.admit_waiting(chunks, copies, left)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.wanted:
                sequence.tokens.append(PLACEHOLDER_TOKEN)
            self.pool.offer(sequence)
        chunks.sort(key=lambda chunk: chunk.count > 1)
        return Step(chunks, copies)

    def schedule_running(self) -> tuple[list[Chunk], int]:
        """Chunks of those that run, and what is left of the budget."""
        left = self.spec.max_batch_tokens
        chunks: list[Chunk] = []
        drafting = any(sequence.draft_tokens for sequence in self.running)
        owed = sum(map(self.needs_block, self.running)) if drafting else 0  # blocks for tokens, not for guesses
        others = (
            sum(map(is_decoding, self.running)) if drafting else 0
        )  # who have a token each to come, before any guess
        for sequence in list(self.running):
            start = sequence.computed
            if left and sequence.state is SequenceStatus.RUNNING and is_decoding(sequence):
                owed -= drafting and self.needs_block(sequence)
                others -= drafting
                count = 1 + self.trim_draft_tokens(sequence, left - 1 - others, owed)
                if self.allocate_slots(sequence, start + count):
                    chunks.append(Chunk(sequence, start, count, count))
                    left -= count
        for sequence in self.running:
            missing = len(sequence.tokens) - sequence.computed
            if left and missing > 1:
                chunks.append(chunk_of(sequence, left))
                left -= chunks[-1].count
        return chunks, left

    def admit_waiting(self, chunks: list[Chunk], copies: list[tuple[int, int]], left: int) -> None:
        """By rank, as long as there is room. Nothing is freed from here on, so that what is copied stays in place."""
        for sequence in list(self.waiting):
            if not left or not self.slots or sequence.known < len(sequence.tokens):
                break
            siblings = [] if sequence.alone else running_siblings(sequence)
            parent = next((s for s in siblings if s.computed >= s.prompt and s not in self.admitted), None)
            if siblings and parent is None:
                continue  # the prompt is being computed: soon it can be shared
            if not (self.fork_from(sequence, parent, copies) if parent else self.begin(sequence)):
                break
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=RANK)
            sequence.state = SequenceStatus.RUNNING
            sequence.slot = heapq.heappop(self.slots)
            self.admitted.append(sequence)
            chunks.append(chunk_of(sequence, left))
            left -= chunks[-1].count

    def begin(self, sequence: Sequence) -> bool:
        """Gives it blocks for all its tokens, those that the prefix cache holds among them, if there are enough."""
        matched = self.match(sequence)
        if not self.room(self.free_blocks_needed(sequence, matched)):
            return False
        self.pool.hold(matched)
        sequence.blocks = matched + self.pool.take(self.pool.blocks_for(sequence.known) - len(matched))
        sequence.offered = len(matched)
        sequence.computed = sequence.given = len(matched) * self.pool.size
        if self.pool.prefix_cache:
            self.prefix_queries += sequence.known
            self.prefix_hits += sequence.computed
        if not sequence.preempted and not sequence.index:
            sequence.request.cached_tokens = sequence.computed
        return True

    def fork_from(self, sequence: Sequence, parent: Sequence, copies: list[tuple[int, int]]) -> bool:
        """The prompt of another answer to the same request is its own too."""
        start = min(sequence.prompt, sequence.known - 1)
        if not self.room(self.pool.blocks_for(sequence.known) - start // self.pool.size):
            return False
        sequence.blocks, copied = self.pool.fork(parent, start)
        copies += copied
        sequence.blocks += self.pool.take(self.pool.blocks_for(sequence.known) - len(sequence.blocks))
        sequence.computed = sequence.given = start
        return True

    def match(self, sequence: Sequence) -> list[int]:
        # Log-probabilities of the prompt need all its logits: nothing can be skipped.
        whole = sequence.alone or sequence.params.prompt_logprobs is not None
        return [] if whole else self.pool.match(sequence)

    def free_blocks_needed(self, sequence: Sequence, matched: list[int]) -> int:
        """Blocks of the free list that it takes: what it lacks, and what it finds there."""
        lacking = self.pool.blocks_for(sequence.known) - len(matched)
        return lacking + sum(not self.pool.counts[block] for block in matched)

    def room(self, blocks: int) -> bool:
        return self.pool.available >= blocks + (self.watermark if self.running else 0)

    def trim_draft_tokens(self, sequence: Sequence, left: int, owed: int) -> int:
        """Keeps as many guesses as the step has room for. Blocks that are owed to tokens stay: nobody is preempted."""
        if not sequence.draft_tokens:
            return 0
        room = (len(sequence.blocks) + self.pool.available - owed) * self.pool.size - len(sequence.tokens)
        most = min(left, room, sequence.limit - len(sequence.tokens) - 1)
        sequence.draft_tokens = sequence.draft_tokens[: max(most, 0)]
        return len(sequence.draft_tokens)

    def needs_block(self, sequence: Sequence) -> bool:
        """Whether the token that it computes next needs another one."""
        return sequence.computed >= len(sequence.blocks) * self.pool.size

    def allocate_slots(self, sequence: Sequence, tokens: int) -> bool:
        """Gives it blocks for so many tokens; false if it had to give up its own."""
        missing = self.pool.blocks_for(tokens) - len(sequence.blocks)
        while self.pool.available < missing:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        return True

    def preempt_for(self) -> None:
        """For an urgent request at the head of the queue, if it is enough that less urgent ones step back."""
        if not self.waiting or running_siblings(head := self.waiting[0]):
            return
        behind: list[Sequence] = []
        for each in reversed(self.running):
            if each.rank < head.rank or each.request.priority <= head.request.priority:
                break
            behind.append(each)
        if not behind:
            return
        theirs = sum(self.pool.counts[block] == 1 for each in behind for block in each.blocks)
        if self.free_blocks_needed(head, self.match(head)) + self.watermark > self.pool.available + theirs:
            return
        for each in behind:
            if self.slots and self.room(self.free_blocks_needed(head, self.match(head))):
                return
            self.preempt(each)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old rank; its tokens so far are kept and computed again."""
        self.running.remove(sequence)
        self.release(sequence)
        sequence.state = SequenceStatus.WAITING
        sequence.computed = 0
        sequence.draft_tokens = []
        sequence.preempted += 1
        self.preemptions += 1
        bisect.insort(self.waiting, sequence, key=RANK)

    def again(self, sequence: Sequence) -> None:
        """All of its known tokens are computed anew, by itself; those that the device has picked since are nothing."""
        sequence.alone = True
        del sequence.tokens[sequence.known :]
        if sequence.state is SequenceStatus.RUNNING:
            self.preempt(sequence)


def is_decoding(sequence: Sequence) -> bool:
    """Whether its latest token is all that is to be computed, and another one may follow."""
    return len(sequence.tokens) == sequence.computed + 1 < sequence.limit


def running_siblings(sequence: Sequence) -> list[Sequence]:
    """Other answers to the same request that run now."""
    return [
        each for each in sequence.request.sequences if each.state is SequenceStatus.RUNNING and each is not sequence
    ]


def chunk_of(sequence: Sequence, left: int) -> Chunk:
    """As much of what is missing as the budget allows."""
    missing = len(sequence.tokens) - sequence.computed
    count = min(missing, left)
    return Chunk(sequence, sequence.computed, count, int(count == missing))
