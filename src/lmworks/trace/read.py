"""Reads traces of a job, whatever profiler wrote them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..spec.errors import DataError
from .kineto import read_trace
from .model import Trace
from .nsys import is_nsys, read_nsys


def read_traces(
    files: Sequence[Path], progress: Callable[[str, int, int], None] = lambda stage, done, total: None
) -> list[Trace]:
    """One trace a rank: of each file of PyTorch's profiler, and of each process in an export of Nsight Systems."""
    traces: dict[int, Trace] = {}
    for number, file in enumerate(files):
        progress(f"reading {file.name}", number, len(files))
        for trace in read_nsys(file, number) if is_nsys(file) else [read_trace(file, number)]:
            if (same := traces.setdefault(trace.rank, trace)) is not trace:
                raise DataError(
                    f"{same.source} and {trace.source} are both of rank {trace.rank}; give one file a rank, of one "
                    "recording (a file that does not say its rank inside is named so: rank3.json)"
                )
    return list(traces.values())
