"""A simulated server with continuous batching, by the rules of our engine's scheduler (engine/core/scheduler.py).

A step has first a token of every decoding sequence, then the rest of the running prompts, then new sequences in order
of arrival while the token budget, the slots and the KV blocks last. A sequence gets the blocks of all its tokens when
it is admitted, and one more whenever it fills its last; where there is none, the youngest sequence is preempted: it
waits at its old place and is computed again.

Between arrivals and ends nothing changes but the length of the sequences, so many steps of decoding are one event
(`Leap`). A request that comes in between ends the leap at the next step.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from operator import attrgetter

from .prefix_cache import PrefixCache
from .server_model import ServerModel
from .trace import Arrival

NUMBER = attrgetter("number")


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on a server. `computed` tokens are in the cache of `prompt + generated` that are known."""

    number: int  # in order of arrival
    arrival: Arrival
    computed: int = 0
    generated: int = 0
    pages: int = 0  # private ones
    ids: tuple[int, ...] = ()  # of its prefix, that it holds
    cached: int = 0  # tokens that were found in the cache when it was first admitted
    preemptions: int = 0
    first: float = math.nan  # seconds: the first token, and the last
    last: float = math.nan

    @property
    def known(self) -> int:
        return self.arrival.prompt + self.generated

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.known == self.computed + 1


@dataclass(frozen=True)
class Leap:
    """`steps` steps from `start`: a token each of the decoding sequences, and chunks of prompts (then it is one)."""

    start: float
    steps: int
    seconds: float
    decoding: list[Sequence]
    keys: int  # tokens in their caches at the first step
    chunks: list[tuple[Sequence, int]]

    @property
    def end(self) -> float:
        return self.start + self.seconds


class Server:
    def __init__(self, model: ServerModel, id_tokens: int, started: float = 0.0, ready: float = 0.0) -> None:
        """`id_tokens`: tokens of an id of a prefix. Seconds: when it was asked for, and when it takes requests."""
        self.model, self.id_tokens = model, id_tokens
        self.started, self.ready = started, ready
        self.stopped = math.inf
        self.draining = False
        self.cache = PrefixCache(model.blocks, max(1, id_tokens // model.block))
        self.watermark = model.blocks // 100
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.running: list[Sequence] = []
        self.leap: Leap | None = None
        self.finished: list[Sequence] = []  # since they were last taken
        self.preemptions = 0

    # --- what routers and autoscalers see -------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.running)

    def matched(self, arrival: Arrival) -> int:
        """Tokens of a prompt that are in the cache; the last is always computed."""
        if not self.model.prefix_cache or not arrival.prefix:
            return 0
        found = self.cache.match(arrival.prefix[: arrival.prompt // self.id_tokens]) * self.id_tokens
        return min(found, (arrival.prompt - 1) // self.id_tokens * self.id_tokens)

    # --- time -----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        bisect.insort(self.waiting, sequence, key=NUMBER)
        if self.leap is None:
            self.begin(now)
        elif self.leap.steps > 1:
            self.leap = self.shortened(self.leap, now)

    def shortened(self, leap: Leap, now: float) -> Leap:
        """Ends with the step that is under way at `now`."""
        sequences = len(leap.decoding)

        def seconds(steps: int) -> float:
            return self.model.steps.steps(steps, sequences, leap.keys)

        steps = bisect.bisect_left(range(1, leap.steps), now - leap.start, key=seconds) + 1
        return Leap(leap.start, steps, seconds(steps), leap.decoding, leap.keys, leap.chunks)

    def wake(self) -> None:
        """The end of the leap: tokens are there, and the next one begins."""
        assert self.leap is not None
        leap, self.leap = self.leap, None
        for sequence in leap.decoding:  # all of them before any ends and frees its own
            pages = self.missing(sequence, leap.steps)
            self.cache.allocate(pages)
            sequence.pages += pages
        for sequence in leap.decoding:
            self.advance(sequence, leap.steps, leap.steps, leap)
        for sequence, count in leap.chunks:
            done = sequence.computed + count == sequence.known
            self.advance(sequence, count, int(done), leap)
            if done:
                self.publish(sequence, sequence.arrival.prompt)
        if self.waiting or self.running:
            self.begin(leap.end)

    def advance(self, sequence: Sequence, computed: int, tokens: int, leap: Leap) -> None:
        sequence.computed += computed
        sequence.generated += tokens
        if tokens and math.isnan(sequence.first):
            sequence.first = leap.end  # a prompt is done in a leap of one step
        if sequence.generated >= sequence.arrival.answer:
            sequence.last = leap.end
            self.publish(sequence, sequence.computed)
            self.free(sequence)
            self.running.remove(sequence)
            self.finished.append(sequence)

    def begin(self, now: float) -> None:
        """Schedules the next step, or as many as are alike."""
        preemptions = self.preemptions
        decoding, chunks, budget = self.schedule_running()
        preempted = self.preemptions > preemptions  # then nobody is admitted in this step, but may be in the next
        if not preempted:
            self.admit(chunks, budget)
        keys = sum(sequence.computed + 1 for sequence in decoding)
        steps = 1 if chunks or preempted else self.alike(decoding)
        pairs = sum(count * (sequence.computed + count / 2) for sequence, count in chunks)
        model = self.model.steps
        seconds = model.steps(steps, len(decoding), keys)
        seconds += model.prompt_token * sum(count for _, count in chunks) + model.prompt_key * pairs
        self.leap = Leap(now, steps, seconds, decoding, keys, chunks)

    def schedule_running(self) -> tuple[list[Sequence], list[tuple[Sequence, int]], int]:
        """Decoding sequences, chunks of running prompts, and what is left of the token budget."""
        budget = self.model.max_batch_tokens
        decoding: list[Sequence] = []
        for sequence in list(self.running):
            if budget and sequence.decoding and self.grow(sequence):  # a preempted one decodes no more
                decoding.append(sequence)
                budget -= 1
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if budget and not sequence.decoding:
                chunks.append((sequence, min(budget, sequence.known - sequence.computed)))
                budget -= chunks[-1][1]
        return decoding, chunks, budget

    def grow(self, sequence: Sequence) -> bool:
        """A page for its next token, preempting the youngest where there is none; false if it went itself."""
        if self.covered(sequence) > sequence.computed:
            return True
        while not self.cache.allocate(1):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.pages += 1
        return True

    def covered(self, sequence: Sequence) -> int:
        """Tokens that its pages have room for."""
        return sequence.pages * self.model.block + len(sequence.ids) * self.cache.pages_of_id * self.model.block

    def preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        bisect.insort(self.waiting, sequence, key=NUMBER)

    def admit(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.model.max_seqs:
            sequence = self.waiting[0]
            if not self.allocate(sequence):
                break
            del self.waiting[0]
            bisect.insort(self.running, sequence, key=NUMBER)
            chunks.append((sequence, min(budget, sequence.known - sequence.computed)))
            budget -= chunks[-1][1]

    def allocate(self, sequence: Sequence) -> bool:
        """Pages for all known tokens, what is cached included."""
        hit = self.matched(sequence.arrival)
        ids = sequence.arrival.prefix[: hit // self.id_tokens]
        pages = -(-(sequence.known - len(ids) * self.cache.pages_of_id * self.model.block) // self.model.block)
        reserve = self.watermark if self.running else 0
        if pages + reserve + self.cache.idle_pages(ids) > self.cache.available:
            return False
        self.cache.hold(ids)
        self.cache.allocate(pages)
        sequence.pages, sequence.ids, sequence.computed = pages, ids, hit
        if not sequence.preemptions:
            sequence.cached = hit
        return True

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Blocks that are full and have an id can be found by others from now on."""
        if not self.model.prefix_cache:
            return
        for one in sequence.arrival.prefix[len(sequence.ids) : tokens // self.id_tokens]:
            if sequence.pages < self.cache.pages_of_id or not self.cache.publish(one):
                break
            sequence.pages -= self.cache.pages_of_id
            sequence.ids = (*sequence.ids, one)

    def free(self, sequence: Sequence) -> None:
        self.cache.private -= sequence.pages
        self.cache.release(sequence.ids)
        sequence.pages, sequence.ids = 0, ()

    # --- leaps ----------------------------------------------------------------------------------------

    def alike(self, decoding: list[Sequence]) -> int:
        """Steps until one ends, or until the pages may not last for all."""
        steps = min(sequence.arrival.answer - sequence.generated for sequence in decoding)
        if self.pages_for(decoding, steps) > self.cache.available:
            steps = bisect.bisect_right(
                range(1, steps + 1), self.cache.available, key=lambda count: self.pages_for(decoding, count)
            )
        return max(1, steps)

    def pages_for(self, decoding: list[Sequence], steps: int) -> int:
        return sum(self.missing(sequence, steps) for sequence in decoding)

    def missing(self, sequence: Sequence, steps: int) -> int:
        """Pages that it needs, besides its own, for so many more tokens."""
        return max(0, -(-(sequence.computed + steps - self.covered(sequence)) // self.model.block))
