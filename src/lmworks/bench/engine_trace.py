"""What every step of an engine did and when: a thin layer between the engine and its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from ..engine.core.engine import Engine, RunnerProtocol
from ..engine.core.request import Sequence as Answering
from ..engine.core.scheduler import Chunk, Step


@dataclass
class Taken:
    """One step, in seconds of the performance counter."""

    chunks: list[Chunk]
    launched: float  # when its launch began
    launch: float  # how long that took
    waited: float = 0.0  # for its tokens
    ended: float = 0.0  # when they were there
    kv_use: float = 0.0  # part of the pool that is held

    @property
    def prompt_tokens(self) -> int:
        """Those computed again after a preemption count, too."""
        return sum(chunk.count for chunk in self.chunks if not decodes(chunk))

    @property
    def decoding(self) -> int:
        """Sequences that go on by a token."""
        return sum(decodes(chunk) for chunk in self.chunks)


def decodes(chunk: Chunk) -> bool:
    return chunk.start >= chunk.sequence.num_prompt_tokens and chunk.num_logits == chunk.count


@dataclass
class Trace:
    began: float = field(default_factory=time.perf_counter)
    steps: list[Taken] = field(default_factory=list)

    def durations(self) -> list[float]:
        """Of each step: from the end of the one before it to its own, as the device works without a gap between."""
        ends = [self.began, *(step.ended for step in self.steps)]
        return [end - before for before, end in pairwise(ends)]

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended - self.began if self.steps else 0.0

    def between_tokens(self) -> list[float]:
        """Seconds from each token of an answer to its next. Several tokens of one step share its time."""
        latest: dict[Answering, float] = {}
        gaps = []
        for step in self.steps:
            for chunk in step.chunks:
                if chunk.num_logits:
                    if (before := latest.get(chunk.sequence)) is not None:
                        gaps.append(step.ended - before)
                    latest[chunk.sequence] = step.ended
        return gaps

    def host_share(self, synchronous: bool) -> float:
        """Part of the time in which nobody computed or waited for the device: scheduling, packing, launching, reading.

        Where a launch computes (CPU), the launches are the device's time; elsewhere the host's work overlaps it, and
        a share near 1 means that the device waits for the host.
        """
        device = sum(step.launch if synchronous else step.waited for step in self.steps)
        return 1 - device / self.seconds if self.seconds else 0.0


class Watched:
    """A device as the engine sees it, with a clock; all else is its own."""

    def __init__(self, inner: RunnerProtocol, engine: Engine, trace: Trace) -> None:
        self.inner, self.engine, self.trace = inner, engine, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, step: Step) -> Any:
        began = time.perf_counter()
        launched = self.inner.launch(step)
        taken = Taken(step.chunks, began, time.perf_counter() - began)
        pool = self.engine.scheduler.pool
        taken.kv_use = pool.num_used_blocks / len(pool.ref_counts)
        self.trace.steps.append(taken)
        return WatchedStep(launched, taken)


class WatchedStep:
    def __init__(self, inner: Any, taken: Taken) -> None:
        self.inner, self.taken = inner, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self) -> Any:
        began = time.perf_counter()
        token_output = self.inner.read()
        self.taken.ended = time.perf_counter()
        self.taken.waited = self.taken.ended - began
        return token_output


@contextmanager
def watched(engine: Engine) -> Iterator[Trace]:
    """All steps that the engine takes meanwhile; it must be idle before and after."""
    trace, inner = Trace(), engine.runner
    engine.runner = cast(RunnerProtocol, Watched(inner, engine, trace))
    try:
        yield trace
    finally:
        engine.runner = inner
