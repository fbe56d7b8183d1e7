"""Tries a remedy: the steps of a spec under the profiler, as it is and with overrides."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..spec import LMWorksError, load_run


@dataclass(frozen=True)
class Trial:
    """Seconds of a step before and after; `gain` is of the time that a sequence takes."""

    before_s: float
    after_s: float
    gain: float


def try_remedy(source: str, overrides: Sequence[str], steps: int) -> Trial:
    """Record both, one after the other, each with its own ranks; `source` is a spec or a run folder."""
    sizes = []
    for changes in ((), tuple(overrides)):
        spec = load_run(source, list(changes))
        sizes.append(spec.data.global_batch or spec.data.micro_batch * spec.parallel.dp)
    before, after = step_seconds(source, (), steps), step_seconds(source, overrides, steps)
    return Trial(before, after, 1 - (after / sizes[1]) / (before / sizes[0]))


def step_seconds(source: str, overrides: Sequence[str], steps: int) -> float:
    """The median of a step's seconds over steps and ranks."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(steps), "--run-dir", str(Path(folder) / "run"), "--json"]
        command = [sys.executable, "-m", "lmworks", "profile", "train", source, *overrides, *options]
        ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise LMWorksError(f"profile train {source} {' '.join(overrides)}: {said.removeprefix('lmworks: error: ')}")
    rows: list[dict[str, Any]] = json.loads(ended.stdout)["steps"]
    seconds = sorted(row["seconds"] for row in rows)
    return float(seconds[len(seconds) // 2])
