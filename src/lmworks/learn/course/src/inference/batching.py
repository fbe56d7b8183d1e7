"""Continuous batching: at every step the engine chooses anew which requests compute how many tokens.

    python src/inference/batching.py

counts the steps beside those of static batching.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inference.paging import grow


@dataclass(eq=False)
class Request:
    """Prompt and answer by their numbers of tokens; it comes before step `arrival`."""

    name: str
    prompt: int
    answer: int
    arrival: int = 0
    written: int = 0  # tokens of the answer that are there
    cached: int = 0  # tokens of prompt and answer whose keys and values are in its blocks
    table: list[int] = field(default_factory=list)  # its blocks of the KV cache

    @property
    def tokens(self) -> int:
        return self.prompt + self.written

    @property
    def missing(self) -> int:
        """Tokens to compute until it writes the next one: while it decodes 1, its newest."""
        return self.tokens - self.cached

    @property
    def finished(self) -> bool:
        return self.written == self.answer


class Engine:
    """`blocks` of `block` tokens for keys and values; a step computes `budget` tokens at most.

    Each request fits the blocks when it is alone.
    """

    def __init__(self, blocks: int, block: int, budget: int) -> None:
        self.free, self.block, self.budget = list(range(blocks)), block, budget
        self.waiting: list[Request] = []  # both lists: the oldest first
        self.running: list[Request] = []

    def release(self, request: Request) -> None:
        """Out of `running`. Its blocks are free, and what they held is lost."""
        self.running.remove(request)
        self.free += request.table
        request.table, request.cached = [], 0

    def schedule(self) -> list[tuple[Request, int]]:
        """Which requests compute how many tokens in the next step; `waiting`, `running` and the tables follow.

        Finished requests leave. Then each running one, the oldest first, gets blocks for all its tokens and computes
        as many of the missing ones as the budget has left. While too few blocks are free for it, the youngest running
        request is preempted: it goes to the front of `waiting`, to compute all its tokens again. Last, waiting
        requests are admitted in order and compute in the same way, until the budget is spent or too few blocks are
        free for all tokens of the next one. Nobody is preempted for them.
        """
        # exercise continuous_batching(self)
        for request in [one for one in self.running if one.finished]:
            self.release(request)
        budget = self.budget
        work: list[tuple[Request, int]] = []
        for request in list(self.running):
            while request in self.running and not grow(request.table, request.tokens, self.free, self.block):
                self.waiting.insert(0, self.running[-1])
                self.release(self.running[-1])
            if request in self.running:
                work.append((request, min(request.missing, budget)))
                budget -= work[-1][1]
        while self.waiting and budget and grow(self.waiting[0].table, self.waiting[0].tokens, self.free, self.block):
            request = self.waiting.pop(0)
            self.running.append(request)
            work.append((request, min(request.missing, budget)))
            budget -= work[-1][1]
        return work
        # end continuous_batching

    def compute(self, work: list[tuple[Request, int]]) -> None:
        """A forward pass: who has computed all its tokens writes one."""
        for request, tokens in work:
            request.cached += tokens
            if not request.missing:
                request.written += 1


def serve(engine: Engine, requests: list[Request]) -> int:
    """Steps until every request is answered."""
    steps, coming = 0, sorted(requests, key=lambda one: one.arrival)
    while not all(one.finished for one in requests):
        while coming and coming[0].arrival <= steps:
            engine.waiting.append(coming.pop(0))
        engine.compute(engine.schedule())
        steps += 1
    return steps


def static_steps(requests: list[Request], blocks: int, block: int, budget: int) -> int:
    """Of static batching: as many requests as fit with their whole answers, the next when all of them have ended."""
    steps, coming = 0, sorted(requests, key=lambda one: one.arrival)
    while coming:
        steps = max(steps, coming[0].arrival)
        batch: list[Request] = []
        held = 0
        while coming and coming[0].arrival <= steps:
            held += -(-(coming[0].prompt + coming[0].answer - 1) // block)
            if held > blocks:
                break
            batch.append(coming.pop(0))
        steps += -(-sum(one.prompt for one in batch) // budget) + max(one.answer for one in batch) - 1
    return steps


def main() -> None:
    lengths = [(8, 4), (3, 30), (20, 2), (5, 12), (9, 3), (4, 25), (16, 6), (2, 9), (7, 2), (12, 18), (5, 5), (3, 14)]
    requests = [Request(chr(65 + index), *one, arrival=index // 2) for index, one in enumerate(lengths)]
    print(f"{len(requests)} requests, 16 blocks of 4 tokens, 16 tokens a step:")
    print(f"  static batching      {static_steps(requests, 16, 4, 16):>3} steps")
    print(f"  continuous batching  {serve(Engine(16, 4, 16), requests):>3} steps")


if __name__ == "__main__":
    main()
