"""`log.profile = [first, last]`: a profiler trace and a memory snapshot of chosen steps on chosen ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..record import RunFolder
from ..spec import LogSpec


class Profiler:
    """Around every step; records only those that were asked for.

    Writes traces/rank0-steps-10-12.json (Chrome's and Perfetto's format) and, on a GPU, .pickle beside it for PyTorch's
    memory viewer. On a CPU the trace itself holds every allocation.
    """

    def __init__(self, log: LogSpec, folder: RunFolder, device: torch.device) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.first, self.last = log.profile if log.profile and self.rank in log.profile_ranks else (0, 0)
        self.folder, self.device = folder, device
        self.running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self.first and self.running is None and self.first <= number <= self.last:
            self.start()
        with torch.profiler.record_function(f"step {number}") if self.running else nullcontext():
            yield
        if self.running is not None and number >= self.last:
            self.close()

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        self.running = recorder(self.device, profile_memory=True, record_shapes=True)
        self.running.start()

    def close(self) -> None:
        """Write what was recorded; a run that ends early still leaves its trace."""
        if self.running is None:
            return
        self.running.stop()
        self.folder.traces.mkdir(parents=True, exist_ok=True)
        path = self.folder.traces / f"rank{self.rank}-steps-{self.first}-{self.last}.json"
        self.running.export_chrome_trace(str(path))
        if self.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)
        self.running, self.first = None, 0


def recorder(device: torch.device, **options: Any) -> profile:
    """PyTorch's profiler of host and device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints to standard error when it starts and stops
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *cuda], **options)
