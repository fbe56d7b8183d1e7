"""A trace of every step of an engine: a thin wrapper around its model runner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from ..engine.core.engine import Engine, RunnerProtocol
from ..engine.core.request import Sequence as EngineSequence
from ..engine.core.scheduler import Chunk, Step


@dataclass
class StepRecord:
    """One step, in seconds of the performance counter."""

    chunks: list[Chunk]
    launched: float  # when its launch began
    launch: float  # how long that took
    waited: float = 0.0  # for its tokens
    ended: float = 0.0  # when the tokens were read
    kv_use: float = 0.0  # used share of the KV blocks

    @property
    def prompt_tokens(self) -> int:
        """Includes tokens recomputed after a preemption."""
        return sum(chunk.count for chunk in self.chunks if not decodes(chunk))

    @property
    def decoding(self) -> int:
        """Number of decoding sequences."""
        return sum(decodes(chunk) for chunk in self.chunks)


def decodes(chunk: Chunk) -> bool:
    return chunk.start >= chunk.sequence.num_prompt_tokens and chunk.num_logits == chunk.count


@dataclass
class Trace:
    began: float = field(default_factory=time.perf_counter)
    steps: list[StepRecord] = field(default_factory=list)

    def durations(self) -> list[float]:
        """Seconds of each step, from the end of the previous one: the device works without gaps."""
        ends = [self.began, *(step.ended for step in self.steps)]
        return [end - before for before, end in pairwise(ends)]

    @property
    def seconds(self) -> float:
        return self.steps[-1].ended - self.began if self.steps else 0.0

    def inter_token_latencies(self) -> list[float]:
        """Seconds between consecutive tokens of an answer; several tokens of one step count once."""
        latest: dict[EngineSequence, float] = {}
        gaps = []
        for step in self.steps:
            for chunk in step.chunks:
                if chunk.num_logits:
                    if (before := latest.get(chunk.sequence)) is not None:
                        gaps.append(step.ended - before)
                    latest[chunk.sequence] = step.ended
        return gaps

    def host_share(self, synchronous: bool) -> float:
        """Share of the time in which the host neither computed nor waited for the device.

        On a CPU a launch computes, so launches are device time. On a GPU host work overlaps with the device, and a
        share near 1 means that the device waits for the host.
        """
        device = sum(step.launch if synchronous else step.waited for step in self.steps)
        return 1 - device / self.seconds if self.seconds else 0.0


class TracedRunner:
    """A model runner with timing; everything else is delegated."""

    def __init__(self, inner: RunnerProtocol, engine: Engine, trace: Trace) -> None:
        self.inner, self.engine, self.trace = inner, engine, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, step: Step) -> Any:
        began = time.perf_counter()
        launched = self.inner.launch(step)
        record = StepRecord(step.chunks, began, time.perf_counter() - began)
        pool = self.engine.scheduler.pool
        record.kv_use = pool.num_used_blocks / len(pool.ref_counts)
        self.trace.steps.append(record)
        return TracedStep(launched, record)


class TracedStep:
    def __init__(self, inner: Any, record: StepRecord) -> None:
        self.inner, self.record = inner, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self) -> Any:
        began = time.perf_counter()
        token_output = self.inner.read()
        self.record.ended = time.perf_counter()
        self.record.waited = self.record.ended - began
        return token_output


@contextmanager
def traced(engine: Engine) -> Iterator[Trace]:
    """Trace all steps of the engine in the block; it must be idle before and after."""
    trace, inner = Trace(), engine.runner
    engine.runner = cast(RunnerProtocol, TracedRunner(inner, engine, trace))
    try:
        yield trace
    finally:
        engine.runner = inner
