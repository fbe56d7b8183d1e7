"""When a rank of a pipeline really works; plan/pipelines/schedule.py says when it should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..plan.pipelines.schedule import Span


class Recorder:
    """Notes when this rank works. On a GPU each note waits for the device: honest spans, at the cost of overlap."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.spans: list[Span] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # not the faster monotonic clock: ranks of a step are compared with each other

    @contextmanager
    def note(self, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        begin = self.now()
        yield
        self.spans.append(Span(self.rank, stage, kind, micro_batch, begin, self.now()))

    def gather(self, group: ProcessGroup) -> list[Span]:
        """Every rank's spans of the step, on every rank; time counts from the first of them."""
        lists: list[list[Span]] = [[] for _ in range(group.size())]
        dist.all_gather_object(lists, self.spans, group=group)
        spans = [span for spans in lists for span in spans]
        start = min(span.begin for span in spans)
        return [span._replace(begin=span.begin - start, end=span.end - start) for span in spans]
