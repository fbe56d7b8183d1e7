"""Predicted against measured: prediction.json beside what metrics.jsonl says about the same thing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..record import RunFolder
from ..record.figures import binary_bytes, duration, short
from ..record.run_summary import Steps, column, median
from ..spec import LMWorksError

# What a run measures of the things that are predicted; the rest of prediction.json says how they follow.
LABELS = {
    "memory_bytes": "peak memory",
    "step_s": "step time",
    "tokens_per_s": "tokens/s",
}
ENOUGH = 20  # steps to judge a spread by
SPREAD = 1.5  # the slowest tenth of steps over the fastest: with more, something else ran beside them
AGAIN = "`lmworks plan hardware --probe` measures this machine again"


@dataclass(frozen=True)
class Row:
    """One figure. `measured` is None where the run has nothing to hold against it, `range` where none was predicted."""

    name: str
    predicted: float
    measured: float | None
    range: tuple[float, float] | None = None
    why: str = ""  # a step time is outside; tokens/s are for the same reason

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted: 1 is a perfect prediction."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    @property
    def outside(self) -> bool:
        return bool(self.range and self.measured is not None and not self.range[0] <= self.measured <= self.range[1])

    def show(self, value: float | None) -> str:
        if value is None:
            return "–"
        forms = {"memory_bytes": binary_bytes, "step_s": duration}
        return forms.get(self.name, short)(value)

    @property
    def cells(self) -> list[str]:
        """Predicted, measured, their ratio, and where it was expected."""
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}"
        expected = " to ".join(map(self.show, self.range)) if self.range else "–"
        return [self.show(self.predicted), self.show(self.measured), ratio, expected]


def compare(folder: RunFolder, steps: Steps) -> list[Row]:
    """The predicted figures that a run measures too; [] where nothing was predicted."""
    said = read_prediction(folder)
    known = [name for name in LABELS if isinstance(said.get(name), int | float)]
    rows = [Row(name, said[name], measure(name, steps), range_of(name, said)) for name in known]
    return [replace(row, why=reason(row, said, steps)) if row.outside and row.name == "step_s" else row for row in rows]


def read_prediction(folder: RunFolder) -> dict[str, Any]:
    path = folder.prediction_path
    try:
        prediction = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LMWorksError(f"cannot read {path}: {error}") from None
    if not isinstance(prediction, dict):
        raise LMWorksError(f"cannot read {path}: it is not a JSON object")
    return prediction


def range_of(name: str, said: dict[str, Any]) -> tuple[float, float] | None:
    """Of the step time as it was predicted; tokens/s follow."""
    if name not in ("step_s", "tokens_per_s") or not said.get("interval") or not said.get("step_s"):
        return None
    low, high = said["interval"]
    if name == "step_s":
        return low, high
    return said[name] * said["step_s"] / high, said[name] * said["step_s"] / low


def measure(name: str, steps: Steps) -> float | None:
    """A peak for memory, a median for what every step has anew."""
    return max(column(steps, name), default=None) if name == "memory_bytes" else median(steps, name)


def busy_words(said: dict[str, Any]) -> str:
    """What to know of predictions by a machine that was not left alone while it was measured; else nothing."""
    if said.get("quiet") is not False:
        return ""
    return (
        f"The machine was busy while it was measured: runs took {said['noise']:.1f} × what they take alone. The "
        "predicted time is of the machine alone; its range reaches to one that stays as busy."
    )


def reason(row: Row, said: dict[str, Any], steps: Steps) -> str:
    """Why a step time may be outside its range, as far as the run tells."""
    assert row.range and row.ratio and row.measured  # it is outside
    times, slow, quiet = sorted(column(steps, "step_s")), row.measured > row.range[1], said.get("quiet")
    low, high = (times[len(times) // 10], times[-1 - len(times) // 10]) if len(times) >= ENOUGH else (1.0, 1.0)
    if quiet is None:
        why = "the rates are of its kind, not of this machine: `lmworks plan calibrate` measures it"
    elif slow and high > SPREAD * low:
        why = f"steps took {duration(low)} to {duration(high)}: other work ran beside the training"
    elif slow and not quiet:
        why = f"the machine was busier still than when runs took {said['noise']:.1f} × what they take alone"
    elif slow:
        why = f"the machine was slower than when it was measured, or the run does what is not modelled; {AGAIN}"
    elif not quiet:
        why = f"rates that were measured on a busy machine were too low; {AGAIN}, best while it is quiet"
    else:
        why = f"the machine was faster than when it was measured; {AGAIN}"
    span = " to ".join(f"{end / row.predicted:.2f}" for end in row.range)
    return f"{row.label}: measured {row.ratio:.2f} × predicted, outside {span} ×: {why}"
