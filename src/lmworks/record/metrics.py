"""`metrics.jsonl`: one line a step. A step that is replayed after a resume is written again with a higher `attempt`.

`stats.jsonl`: statistics of the blocks of the model, at multiples of `health.stats_every`.

    {"step": 100, "attempt": 0, "parts": {"embed": {...}, "0": {...}, …, "head": {...}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from ..spec.errors import LMWorksError
from .folder import now
from .jsonl import LineWriter, read_lines


class StepMetrics(TypedDict, total=False):
    """What a line can hold. None is "not known here": `mfu` without a peak, `memory_bytes` without a way to ask."""

    step: int  # 1 for the first optimizer step
    attempt: int  # 0 for the first start of the run, one more for each resume
    time: str  # when the line was written, after the step and its evaluation; ISO 8601, UTC
    loss: float | None  # mean over the tokens of the global batch
    lr: float
    grad_norm: float | None  # before clipping
    tokens: int  # trained on in this step; the run's total is the sum over steps
    tokens_per_s: float
    step_s: float  # wall time of the step, of which:
    data_s: float  # waiting for the batch
    forward_backward_s: float
    optimizer_s: float
    checkpoint_s: float  # not in step_s: the save since the step before
    memory_bytes: int | None  # peak so far: allocated on a device, resident on a CPU
    model_tflops: float
    mfu: float | None
    val_loss: float  # on the steps that evaluate
    loss_scale: float  # fp16
    step_skew: float  # busy time of the busiest rank over that of the median one; with several ranks
    rewound: bool  # of the first step after a resume from an older checkpoint
    nonfinite: dict[str, str]  # added by the writer: the keys that are null because they were nan, inf or -inf


class MetricsWriter(LineWriter):
    """Appends steps, each stamped with this process's attempt and the time.

    `rewound`: its first line says that what is there of that step and later ones is void.
    """

    def __init__(self, path: Path, attempt: int, rewound: bool = False) -> None:
        super().__init__(path)
        self.attempt, self.rewound = attempt, rewound

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        mark = {"rewound": True} if self.rewound else {}
        self.append({"step": step, "attempt": self.attempt, "time": now(), **mark, **values})
        self.rewound = False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in order, each once: the line of its highest attempt.

    An attempt that goes back to an earlier step has rewound: what was written of that step and later ones is void. So
    it is after a resume from a chosen older step.
    """
    steps: dict[int, dict[str, Any]] = {}
    last, at = -1, 0  # attempt and step of the line before
    for number, line in enumerate(read_lines(path), 1):
        if not isinstance(line.get("step"), int) or not isinstance(line.get("attempt"), int):
            raise LMWorksError(f"{path}, line {number} is damaged: 'step' or 'attempt' is missing or not an integer")
        step, attempt = line["step"], line["attempt"]
        if (last == attempt and step <= at) or line.get("rewound"):
            steps = {number: old for number, old in steps.items() if number < step}
        last, at = attempt, step
        if step not in steps or attempt >= steps[step]["attempt"]:
            steps[step] = line
    return [steps[step] for step in sorted(steps)]


# --- stats -----------------------------------------------------------------------------------------------


class PartStats(TypedDict, total=False):
    """Of one block (named by its number), or of the modules around the blocks. Activations are those of blocks."""

    act_mean_abs: float  # of the block's output, over all tokens of the step
    act_rms: float
    act_max: float  # the largest absolute value
    grad_norm: float  # before clipping
    param_norm: float  # after the update
    update_ratio: float  # norm of the update over the norm of the weights


def read_stats(path: Path) -> list[dict[str, Any]]:
    """The steps in order, each once, as `read_metrics` takes them."""
    return read_metrics(path)
