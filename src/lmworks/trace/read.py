"""Reads traces of a job, whatever profiler wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .kineto import read_trace
from .model import Trace
from .nsys import is_nsys, read_nsys


def read_traces(
    files: Sequence[Path], progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> list[Trace]:
    """One trace a rank: of each file of PyTorch's profiler, and of each process in an export of Nsight Systems."""
    traces: list[Trace] = []
    for number, file in enumerate(files):
        progress(f"reading {file.name}", number, len(files))
        traces += read_nsys(file) if is_nsys(file) else [read_trace(file, number)]
    return traces
