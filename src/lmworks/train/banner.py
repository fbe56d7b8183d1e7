"""What a person at a terminal is told before the first step: what is trained, where, and for how long."""

from __future__ import annotations

import json
from contextlib import suppress

import torch

from ..record import RunFolder
from ..record.formatting import clock, duration
from ..spec import RunSpec


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
