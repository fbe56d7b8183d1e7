"""Mean and standard deviation of a reward model's rewards on held-out pairs, in a file beside its weights.

Whoever scores with the model subtracts one and divides by the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec import CheckpointError
from ..spec.files import write_whole

STATS = "reward_stats.json"


@dataclass(frozen=True)
class RewardStats:
    mean: float = 0.0
    std: float = 1.0
    step: int | None = None  # of the run, whose weights were measured


def read_stats(folder: Path) -> RewardStats:
    """Of a run or Hugging Face folder; rewards are taken as they are where it has none."""
    path = folder / STATS
    if not path.is_file():
        return RewardStats()
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return RewardStats(float(table["mean"]), float(table["std"]), table.get("step"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: expected a JSON object with the numbers 'mean' and 'std'") from None


def write_stats(folder: Path, stats: RewardStats) -> None:
    write_whole(folder / STATS, json.dumps(asdict(stats)))


def copy_stats(run: Path, out: Path, step: int) -> None:
    """With the weights of `step` from a run to an export; those of other weights stay, and old ones in `out` go."""
    (out / STATS).unlink(missing_ok=True)
    stats = read_stats(run)
    if stats.step == step:
        write_stats(out, stats)
