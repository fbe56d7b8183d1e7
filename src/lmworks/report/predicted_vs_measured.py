"""Predicted against measured: prediction.json beside metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..record import RunFolder
from ..record.formatting import binary_bytes, clock, duration, short
from ..record.run_summary import Steps, column, median
from ..spec import LMWorksError

# Predicted figures that a run measures too.
LABELS = {
    "memory_bytes": "peak memory",
    "step_s": "step time",
    "tokens_per_s": "tokens/s",
    "run_s": "all steps",
    "dollars": "cost of all steps, $",
    "hand_over_bytes": "weights handed to the engine",
    "hand_over_received_bytes": "of a hand-over, from other ranks",
}
AFTER = "after 10 steps"
MIN_STEPS = 20  # for a spread of step times
MAX_SPREAD = 1.5  # slowest tenth of steps over fastest tenth; above, other work shared the machine
PROBE_HINT = "`lmworks plan hardware --probe` measures this machine again"


@dataclass(frozen=True)
class Row:
    """One figure. `predicted` is None if it was not before the first step, `measured` if the run did not measure it,
    `range` if none was predicted.
    """

    name: str
    predicted: float | None
    measured: float | None
    range: tuple[float, float] | None = None
    why: str = ""  # explains a step time outside its range
    after: float | None = None  # predicted after the first steps

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
        if self.name.endswith("bytes"):
            return binary_bytes(value)
        if self.name == "run_s":
            return clock(value) if value >= 60 else duration(value)
        return duration(value) if self.name == "step_s" else short(value)

    @property
    def cells(self) -> list[str]:
        """Predicted, measured, ratio, expected range."""
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}"
        expected = " to ".join(map(self.show, self.range)) if self.range else "–"
        return [self.show(self.predicted), self.show(self.measured), ratio, expected]

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {key: value for key, value in asdict(self).items() if key != "why"}


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells; the second prediction only where there is one."""
    columns, cells = ["", "predicted", "measured", "ratio", "expected"], [[row.label, *row.cells] for row in rows]
    if any(row.after is not None for row in rows):
        columns.insert(2, AFTER)
        for row, line in zip(rows, cells, strict=True):
            line.insert(2, row.show(row.after))
    return columns, cells


def compare(folder: RunFolder, steps: Steps) -> list[Row]:
    """Predicted figures that the run measured too; [] without a prediction. Of a predicted 0 only what is not 0."""
    prediction = read_prediction(folder)
    second = (prediction.get("after_steps") or [{}])[-1]
    told = {name: (number_of(prediction.get(name)), number_of(second.get(name))) for name in LABELS}
    rates = [one["dollars"] / one["run_s"] for one in (second, prediction) if one.get("dollars")]
    rate = next(iter(rates), 0.0)
    rows = [
        Row(name, before, measured(name, folder, steps, rate), predicted_range(name, prediction), after=after)
        for name, (before, after) in told.items()
        if before is not None or after is not None
    ]
    return [
        replace(row, why=out_of_range_reason(row, prediction, steps)) if row.outside and row.name == "step_s" else row
        for row in rows
        if row.predicted or row.measured
    ]


def number_of(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


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


def second_prices(folder: RunFolder) -> list[dict[str, Any]]:
    """One for each attempt that took ten steps."""
    return list(read_prediction(folder).get("after_steps", []))


def predicted_range(name: str, prediction: dict[str, Any]) -> tuple[float, float] | None:
    """Of step time as predicted; tokens/s follow from it."""
    if name not in ("step_s", "tokens_per_s") or not prediction.get("interval") or not prediction.get("step_s"):
        return None
    low, high = prediction["interval"]
    if name == "step_s":
        return low, high
    return prediction[name] * prediction["step_s"] / high, prediction[name] * prediction["step_s"] / low


def measured(name: str, folder: RunFolder, steps: Steps, dollars_s: float) -> float | None:
    """The peak of memory, the sum of the steps once all are taken, the median of everything else."""
    if name in ("run_s", "dollars"):
        if not steps or steps[-1]["step"] < folder.spec().optim.steps:
            return None
        run_s = float(sum(column(steps, "step_s")))
        return run_s if name == "run_s" else dollars_s * run_s or None
    return max(column(steps, name), default=None) if name == "memory_bytes" else median(steps, name)


def busy_note(prediction: dict[str, Any]) -> str:
    """A note on predictions from a calibration on a busy machine; else empty."""
    if prediction.get("quiet") is not False:
        return ""
    return (
        f"The machine was busy while it was measured: runs took {prediction['noise']:.1f} × what they take alone. The "
        "predicted time is of the machine alone; its range reaches to one that stays as busy."
    )


def out_of_range_reason(row: Row, prediction: dict[str, Any], steps: Steps) -> str:
    """Why a step time may be outside its range."""
    assert row.range and row.ratio and row.measured and row.predicted  # it is outside
    times, slow, quiet = sorted(column(steps, "step_s")), row.measured > row.range[1], prediction.get("quiet")
    low, high = (times[len(times) // 10], times[-1 - len(times) // 10]) if len(times) >= MIN_STEPS else (1.0, 1.0)
    if quiet is None:
        why = "the rates are of its kind, not of this machine: `lmworks plan calibrate` measures it"
    elif slow and high > MAX_SPREAD * low:
        why = f"steps took {duration(low)} to {duration(high)}: other work ran beside the training"
    elif slow and not quiet:
        why = f"the machine was busier still than when runs took {prediction['noise']:.1f} × what they take alone"
    elif slow:
        why = f"the machine was slower than when it was measured, or the run does what is not modelled; {PROBE_HINT}"
    elif not quiet:
        why = f"rates that were measured on a busy machine were too low; {PROBE_HINT}, best while it is quiet"
    else:
        why = f"the machine was faster than when it was measured; {PROBE_HINT}"
    span = " to ".join(f"{end / row.predicted:.2f}" for end in row.range)
    return f"{row.label}: measured {row.ratio:.2f} × predicted, outside {span} ×: {why}"
