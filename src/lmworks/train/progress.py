"""Terminal output of a run: the banner, then one live line in a terminal, plain lines everywhere else."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from ..record import RunFolder
from ..record.formatting import clock, duration, short
from ..record.run_summary import VAL_REWARD
from ..spec import RunSpec

REFRESH_S = 0.2  # drawing costs half a millisecond: five times a second is smooth and free
WINDOW = 100  # steps over which the pace is measured, long enough to hold evaluations and saves


class Progress:
    """`step` after every optimizer step, `note` for anything else worth a line. `quiet` prints nothing."""

    def __init__(
        self, total: int, start: int = 0, every: int = 10, quiet: bool = False, stream: IO[str] | None = None
    ) -> None:
        self.total, self.every, self.quiet = total, every, quiet
        self.held_out = ""  # the last evaluation
        self.ends = deque([time.perf_counter()], maxlen=WINDOW)  # when the latest steps ended
        self.drawn = 0.0
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.bar: Bar | None = None
        if not quiet and self.console.is_terminal and not self.console.is_dumb_terminal:
            columns = [TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.fields[line]}")]
            bar = [BarColumn(20)] if self.console.width >= 100 else []  # the figures matter more
            # No refresh thread: it would compete with training for the interpreter.
            self.bar = Bar(columns[0], *bar, columns[1], console=self.console, auto_refresh=False)
            self.task = self.bar.add_task("", total=total, completed=start, line="")
            self.bar.start()

    def step(self, values: Mapping[str, Any]) -> None:
        """`values` is the step's line of metrics.jsonl."""
        step = values["step"]
        self.ends.append(time.perf_counter())
        evaluated = values.get("val_loss") is not None
        if evaluated:
            reward = values.get(VAL_REWARD)
            self.held_out = f"val {values['val_loss']:.4f}" if reward is None else f"val reward {reward:.4f}"
        last = step >= self.total
        if self.bar:
            if last or evaluated or self.ends[-1] - self.drawn > REFRESH_S:
                self.drawn = self.ends[-1]
                self.bar.update(self.task, completed=step, line=self.describe(values), refresh=True)
        elif not self.quiet and (last or evaluated or step % self.every == 0):
            width = len(str(self.total))
            print(f"step {step:>{width}}/{self.total}  {self.describe(values)}", file=self.console.file, flush=True)

    def head(self, text: str) -> None:
        """For people at a terminal: a log has the run folder beside it."""
        if self.bar:
            self.note(text)

    def note(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, markup=False)
        elif not self.quiet:
            print(text, file=self.console.file, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def describe(self, values: Mapping[str, Any]) -> str:
        loss = values.get("loss")
        parts = [f"loss {'-' if loss is None else format(loss, '.4f')}"]
        if self.held_out:
            parts.append(self.held_out)
        if values.get("lr") is not None:
            parts.append(f"lr {values['lr']:.2e}")
        if values.get("tokens_per_s") is not None:
            parts.append(f"{short(values['tokens_per_s'])} tokens/s")
        parts.append(f"ETA {clock(self.pace() * max(0, self.total - values['step']))}")
        return "  ".join(parts)

    def pace(self) -> float:
        """Seconds a step, by the clock: what happens between steps (evaluations, saves) is in it."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def banner(spec: RunSpec, folder: RunFolder, device: torch.device, step: int) -> list[str]:
    ranks, left = spec.parallel.world, spec.optim.steps - step
    where = f"{ranks} × {name_device(device)}" if ranks > 1 else name_device(device)
    begun = f"from step {step:,} to {spec.optim.steps:,}" if step else f"{spec.optim.steps:,} steps"
    return [
        f"{spec.name}: {spec.model.params:,} parameters on {where} ({ranks} rank{'s' * (ranks > 1)}, "
        f"{spec.precision.dtype}), {begun} of {spec.tokens_per_step:,} tokens",
        f"run folder: {folder.path}   {planned_time(folder, left)}",
    ]


def planned_time(folder: RunFolder, left: int) -> str:
    """The planner's word, until steps are measured."""
    step_s = None
    with suppress(OSError, ValueError, AttributeError):  # none was written, or it is damaged
        step_s = json.loads(folder.prediction_path.read_text(encoding="utf-8")).get("step_s")
    if not isinstance(step_s, float):
        return "ETA: known after the first steps"
    return f"ETA {clock(step_s * left)} as planned ({duration(step_s)} a step)"


def name_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
