"""What every benchmark records beside its figures: the machine, the versions and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith(("model name", "CPU part")):
            cpu = f"{platform.machine()} {line.split(':')[1].strip()}"
            break
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Of this tree; LMWORKS_COMMIT says it for one that was sent somewhere without its history."""
    if told := os.environ.get("LMWORKS_COMMIT"):
        return told
    answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown"


def write_result(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine()}
    path.write_text(json.dumps({**stamp, **result}, indent=1) + "\n")
    return path


class DevicePeak:
    """Highest use of the GPU's memory while it is watched, whoever allocated it: a KV cache of mapped pages, CUDA
    graphs and the context are not in `torch.cuda.max_memory_allocated`."""

    def __init__(self) -> None:
        self.bytes = 0

    @property
    def gib(self) -> float | None:
        return self.bytes / 2**30 if torch.cuda.is_available() else None


@contextmanager
def watched_device_memory(every: float = 0.02) -> Iterator[DevicePeak]:
    """Sample the memory that is in use on the GPU by a thread of its own."""
    peak, over = DevicePeak(), threading.Event()

    def watch() -> None:
        while not over.wait(every):
            free, total = torch.cuda.mem_get_info()
            peak.bytes = max(peak.bytes, total - free)

    thread = threading.Thread(target=watch, daemon=True)
    if torch.cuda.is_available():
        thread.start()
    try:
        yield peak
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
