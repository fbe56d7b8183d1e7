"""Predicted against measured: prediction.json beside what metrics.jsonl says about the same thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..record import RunFolder
from ..record.figures import binary_bytes, duration, short
from ..spec import LMWorksError
from .summary import Steps, column, median

LABELS = {
    "params": "parameters",
    "memory_bytes": "peak memory",
    "step_s": "step time",
    "tokens_per_s": "tokens/s",
    "model_tflops": "model TFLOP/s",
    "mfu": "MFU",
}


@dataclass(frozen=True)
class Row:
    """One figure. `measured` is None where the run has nothing to hold against it."""

    name: str
    predicted: float
    measured: float | None

    @property
    def label(self) -> str:
        """In words: `optimizer_s` is the time of the optimizer, the unit stands beside the figure."""
        return LABELS.get(self.name) or self.name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: 1 is a perfect prediction."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    def show(self, value: float | None) -> str:
        if value is None:
            return "–"
        if self.name.endswith("_bytes"):
            return binary_bytes(value)
        if self.name.endswith("_s") and not self.name.endswith("_per_s"):
            return duration(value)
        return f"{value:.1%}" if self.name == "mfu" else short(value)


def compare(folder: RunFolder, steps: Steps) -> list[Row]:
    """Every number of prediction.json, in its order; [] where nothing was predicted."""
    path = folder.prediction_path
    try:
        prediction = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LMWorksError(f"cannot read {path}: {error}") from None
    if not isinstance(prediction, dict):
        raise LMWorksError(f"cannot read {path}: it is not a JSON object")
    params = folder.spec().model.params
    return [Row(name, value, measure(name, steps, params)) for name, value in leaves(prediction)]


def leaves(prediction: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in prediction.items():
        if isinstance(value, dict):
            yield from leaves(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def measure(name: str, steps: Steps, params: int) -> float | None:
    """A peak for memory, a median for what every step has anew."""
    if name == "params":
        return params
    if name == "memory_bytes":
        return max(column(steps, name), default=None)
    return median(steps, name)
