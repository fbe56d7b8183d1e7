"""Predicted against measured: prediction.json beside what metrics.jsonl says about the same thing."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..record import RunFolder
from ..record.figures import binary_bytes, duration, short
from ..spec import LMWorksError
from .summary import Steps, column, median

# What a run measures of the things that are predicted; the rest of prediction.json says how they follow.
LABELS = {
    "memory_bytes": "peak memory",
    "step_s": "step time",
    "tokens_per_s": "tokens/s",
}


@dataclass(frozen=True)
class Row:
    """One figure. `measured` is None where the run has nothing to hold against it."""

    name: str
    predicted: float
    measured: float | None

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: 1 is a perfect prediction."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def show(self, value: float | None) -> str:
        if value is None:
            return "–"
        forms = {"memory_bytes": binary_bytes, "step_s": duration}
        return forms.get(self.name, short)(value)


def compare(folder: RunFolder, steps: Steps) -> list[Row]:
    """The predicted figures that a run measures too; [] where nothing was predicted."""
    path = folder.prediction_path
    try:
        prediction = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LMWorksError(f"cannot read {path}: {error}") from None
    if not isinstance(prediction, dict):
        raise LMWorksError(f"cannot read {path}: it is not a JSON object")
    known = [(name, prediction[name]) for name in LABELS if isinstance(prediction.get(name), int | float)]
    return [Row(name, value, measure(name, steps)) for name, value in known]


def measure(name: str, steps: Steps) -> float | None:
    """A peak for memory, a median for what every step has anew."""
    return max(column(steps, name), default=None) if name == "memory_bytes" else median(steps, name)
