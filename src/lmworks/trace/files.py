"""Which files of a folder are the traces of one recording."""

from __future__ import annotations

import re
from pathlib import Path

TRACES = ("*.json.gz", "*.json", "*.sqlite")
STEPS = re.compile(r"-steps-(\d+-\d+)\.")  # of our own traces


def newest_traces(folder: Path) -> list[Path]:
    """The newest trace of a folder and those that were recorded with it. Names of unfinished ones begin with a dot."""
    found = sorted({file for pattern in TRACES for file in folder.glob(pattern) if not file.name.startswith(".")})
    if not found:
        return []
    newest = recording_of(max(found, key=lambda file: file.stat().st_mtime))
    return [file for file in found if recording_of(file) == newest]


def recording_of(trace: Path) -> str:
    """What the traces of one recording have in common: the steps of our own, else the format."""
    steps = STEPS.search(trace.name)
    return steps[1] if steps else "Nsight Systems" if trace.suffix == ".sqlite" else "Kineto"
