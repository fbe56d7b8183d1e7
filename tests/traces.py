"""Small traces in the profiler's JSON, written event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def span(cat: str, name: str, start: float, duration: float, thread: Any = 1, process: Any = 100, **args: Any) -> Event:
    """Times in microseconds."""
    where = {"pid": process, "tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "cat": cat, "name": name, **where, "args": args}


def kernel(name: str, start: float, duration: float, stream: int = 7, correlation: int = 0, **args: Any) -> Event:
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    return span(cat, name, start, duration, stream, 0, stream=stream, correlation=correlation, **args)


def launch(start: float, correlation: int, duration: float = 2, name: str = "cudaLaunchKernel") -> Event:
    return span("cuda_runtime", name, start, duration, correlation=correlation)


def write_trace(path: Path, events: list[Event], **keys: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **keys, "traceEvents": events, "traceName": path.name}, indent=2))
    return path
