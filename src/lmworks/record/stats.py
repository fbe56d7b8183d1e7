"""`stats.jsonl`: what the blocks of the model look like inside, at the steps that `health.stats_every` asks for.

{"step": 100, "attempt": 0, "parts": {"embed": {...}, "0": {...}, …, "head": {...}}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from .metrics import read_metrics


class PartStats(TypedDict, total=False):
    """Of one block (named by its number), or of what lies around the blocks. Activations are those of blocks alone."""

    act_mean_abs: float  # of the block's output, over all tokens of the step
    act_rms: float
    act_max: float  # the largest absolute value
    grad_norm: float  # before clipping
    param_norm: float  # after the update
    update_ratio: float  # norm of the update over the norm of the weights


def read_stats(path: Path) -> list[dict[str, Any]]:
    """The steps in order, each once, as `read_metrics` takes them."""
    return read_metrics(path)
