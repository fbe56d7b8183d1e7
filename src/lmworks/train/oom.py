"""Out of memory on a rank: the phase, the predicted and the measured peak."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from ..parallel.mesh import Mesh
from ..plan.memory.fit import peak_rows, total
from ..plan.memory.host_need import gib
from ..record import phase
from ..record.heartbeat import phase_text
from ..record.oom import OutOfMemory, is_oom, requested_bytes
from ..spec import RunSpec, SpecError
from .device import PeakMemory

T = TypeVar("T")


def describe_oom(
    error: Exception,
    spec: RunSpec,
    mesh: Mesh | None,
    device: torch.device,
    memory: PeakMemory | None,  # what the run has added, as prediction.json counts it; None before the model is built
    final: bool,  # a restart would fail again
) -> Exception:
    """An out-of-memory error with rank, phase and peaks; any other error unchanged."""
    if isinstance(error, OutOfMemory) or not is_oom(error):
        return error
    place, asked = phase_text(phase.name, phase.step), requested_bytes(error)
    traceback.clear_frames(error.__traceback__)  # its frames hold tensors, and the report needs memory too
    rank = 0 if mesh is None else mesh.rank("world")
    predicted, measured = predicted_bytes(spec, rank, device), None if memory is None else memory.read()
    much = f": {gib(asked)} more could not be allocated" if asked else ""
    peaks = [
        f"predicted {gib(predicted)} at its peak" if predicted else "no peak was predicted",
        f"measured {gib(measured)}" if measured else "none was measured yet",
    ]
    prefix = "" if mesh is None else f"rank {rank}: "
    return OutOfMemory(
        f"{prefix}out of memory in {place}{much}; {', '.join(peaks)} ({device.type})",
        predicted,
        measured,
        final=final,
    )


def with_oom_report(describe: Callable[[Exception], Exception], work: Callable[[], T]) -> T:
    """Run `work`; out-of-memory errors are described."""
    try:
        return work()
    except Exception as error:
        cause = describe(error)
        if cause is error:
            raise
        raise cause from None


def predicted_bytes(spec: RunSpec, rank: int, device: torch.device) -> int | None:
    try:
        return total(peak_rows(spec, rank, device.type))
    except SpecError:
        return None
