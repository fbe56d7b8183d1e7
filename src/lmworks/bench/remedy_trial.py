"""Tries a remedy: the steps of a spec under the profiler, as it is and with overrides, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..spec import LMWorksError, load_run

PAIRS = 3  # recordings without and with the overrides: other load on the machine meets both


@dataclass(frozen=True)
class Trial:
    """Seconds of a step before and after; `gain` is of the time that a sequence takes. Medians over the pairs."""

    before_s: float
    after_s: float
    gain: float
    gain_range: tuple[float, float]
    apart: bool  # every recording with the overrides is on the same side of all without


def try_remedy(source: str, overrides: Sequence[str], steps: int) -> Trial:
    """Record each with its own ranks; `source` is a spec or a run folder."""
    sizes = [load_run(source, changes).data.global_batch for changes in ((), overrides)]
    pairs = [(step_seconds(source, (), steps), step_seconds(source, overrides, steps)) for _ in range(PAIRS)]
    before, after = zip(*pairs, strict=True)
    ratio = sizes[0] / sizes[1]
    gains = [1 - ratio * then / first for first, then in pairs]
    least, most = ratio * min(after), ratio * max(after)  # for as many sequences as before
    apart = most < min(before) or max(before) < least
    return Trial(median(before), median(after), median(gains), (min(gains), max(gains)), apart)


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
    return median(float(row["seconds"]) for row in rows)
