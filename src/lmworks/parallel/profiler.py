"""PyTorch's profiler of one process, and its trace as a gzipped file."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GZIP_LEVEL = 3  # the process waits while it compresses: 4 × as fast as the default, files 15 % larger


def recorder(device: torch.device, **options: Any) -> profile:
    """PyTorch's profiler of host and device."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints to standard error when it starts and stops
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *cuda], **options)


def write_trace(recording: profile, path: Path) -> None:
    """As .json.gz. The name appears when all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain, packed = (path.with_name(f".{path.name}.{end}") for end in ("json", "half"))
    try:
        recording.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", GZIP_LEVEL) as target:
            shutil.copyfileobj(source, target, 2**20)
        packed.replace(path)
    finally:
        for draft in (plain, packed):
            draft.unlink(missing_ok=True)
