"""A fair queue of grammar compilations: no key delays another, no slow grammar a fast one.

A grammar is in one of three lanes; each is round-robin over keys:

    simple   always compiled in milliseconds
    first    tried with a small budget, which is enough for nearly all
    slow     what took more than that, tried with the full budget: one of a key at a time

Of WORKERS threads one is always left for the simple lane, and another for the first.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.core.sampling_params import SamplingParams
from ..engine.grammars.grammar import Grammars, LRUCache, digest, grammar, naming_shape, simple
from ..engine.grammars.grammar_sandbox import FIRST, FULL, TooComplex
from ..spec import SpecError

if TYPE_CHECKING:
    import llguidance

WORKERS = 4
KEPT_SLOW = 1024
SIMPLE, FIRST_LANE, SLOW = range(3)
BUDGETS = {SIMPLE: None, FIRST_LANE: FIRST, SLOW: FULL}
CROWD = {SIMPLE: WORKERS, FIRST_LANE: WORKERS - 1, SLOW: WORKERS - 2}  # threads that a lane and those after it may take


@dataclass(frozen=True, eq=False)
class CompileJob:
    """A request whose grammar is to be compiled."""

    key: str  # for fairness
    params: SamplingParams
    wanted: Callable[[], bool]  # whether the request is still open
    done: Callable[[llguidance.LLMatcher | BaseException], None]  # called in another thread


class Lane:
    """Jobs of several keys, one of each in turn."""

    def __init__(self) -> None:
        self.queues: OrderedDict[str, deque[CompileJob]] = OrderedDict()  # whose turn it is first

    def put(self, job: CompileJob) -> None:
        self.queues.setdefault(job.key, deque()).append(job)

    def take(self, busy: Container[str] = ()) -> CompileJob | None:
        """The next of a key that is not busy."""
        key = next((key for key in self.queues if key not in busy), None)
        if key is None:
            return None
        queue = self.queues.pop(key)
        job = queue.popleft()
        if queue:
            self.queues[key] = queue
        return job


class CompileQueue:
    """For one engine. Threads are started with the first job."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self.lanes = {lane: Lane() for lane in BUDGETS}
        self.working: Counter[int] = Counter()  # threads, by lane
        self.slow_keys: set[str] = set()
        self.found_slow: LRUCache[bool] = LRUCache(KEPT_SLOW)  # digests of grammars
        self.changed = threading.Condition()  # guards all of it
        self.threads: list[threading.Thread] = []

    def put(self, job: CompileJob, lane: int | None = None) -> None:
        with self.changed:
            self.lanes[(SIMPLE if simple(job.params) else FIRST_LANE) if lane is None else lane].put(job)
            if not self.threads:
                self.threads = [
                    threading.Thread(target=self.work, name=f"compile {number}", daemon=True)
                    for number in range(WORKERS)
                ]
                for thread in self.threads:
                    thread.start()
            self.changed.notify()

    def work(self) -> None:
        """The loop of each thread."""
        while True:
            with self.changed:
                while (found := self.next()) is None:
                    self.changed.wait()
            lane, job = found
            try:
                self.compile(job, lane)
            finally:
                with self.changed:
                    self.working[lane] -= 1
                    if lane == SLOW:
                        self.slow_keys.discard(job.key)
                    self.changed.notify_all()

    def next(self) -> tuple[int, CompileJob] | None:
        for lane, crowd in CROWD.items():
            if sum(self.working[each] for each in BUDGETS if each >= lane) >= crowd:
                return None  # nor is there room for those that are slower
            job = self.lanes[lane].take(self.slow_keys if lane == SLOW else ())
            if job is not None:
                self.working[lane] += 1
                if lane == SLOW:
                    self.slow_keys.add(job.key)
                return lane, job
        return None

    def compile(self, job: CompileJob, lane: int) -> None:
        if not job.wanted():
            return  # cancelled while it waited
        found: llguidance.LLMatcher | BaseException
        try:
            text = grammar(job.params)
            if lane == FIRST_LANE and self.slow(text):
                self.put(job, SLOW)
                return
            found = self.grammars.compile(text, BUDGETS[lane])
        except TooComplex as error:
            if lane == FIRST_LANE:
                self.note(text)
                self.put(job, SLOW)
                return
            found = naming_shape(job.params, error)
        except SpecError as error:
            found = naming_shape(job.params, error)
        except BaseException as error:  # a panic of the library is no Exception
            found = error
        job.done(found)

    def slow(self, text: str) -> bool:
        """Whether it is known to take more than the small budget: many may wait for the same."""
        with self.changed:
            known = self.found_slow.get(digest(text)) is not None
        return known and self.grammars.known(text) is None

    def note(self, text: str) -> None:
        with self.changed:
            self.found_slow.put(digest(text), True)
