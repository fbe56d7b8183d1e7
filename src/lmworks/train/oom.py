"""Out of memory on a rank: the phase, the predicted and the measured peak."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..plan.memory.fit import peak_rows, total
from ..plan.memory.host_fit import gib
from ..record import phase
from ..record.life import phase_text
from ..record.oom import OutOfMemory, is_oom, requested_bytes
from ..spec import SpecError

if TYPE_CHECKING:
    from .trainer import Trainer

T = TypeVar("T")


def describe_oom(error: Exception, trainer: Trainer) -> Exception:
    """An out-of-memory error with rank, phase and peaks; any other error unchanged."""
    if isinstance(error, OutOfMemory) or not is_oom(error):
        return error
    place, asked = phase_text(phase.name, phase.step), requested_bytes(error)
    traceback.clear_frames(error.__traceback__)  # its frames hold tensors, and the report needs memory too
    predicted, measured = predicted_bytes(trainer), measured_bytes(trainer)
    much = f": {gib(asked)} more could not be allocated" if asked else ""
    figures = [
        f"predicted {gib(predicted)} at its peak" if predicted else "no peak was predicted",
        f"measured {gib(measured)}" if measured else "none was measured yet",
    ]
    rank = "" if trainer.mesh is None else f"rank {trainer.mesh.rank('world')}: "
    return OutOfMemory(
        f"{rank}out of memory in {place}{much}; {', '.join(figures)} ({trainer.device.type})",
        predicted,
        measured,
        final=trainer.start_step is None or trainer.step == trainer.start_step,
    )


def with_oom_report(trainer: Trainer, work: Callable[[], T]) -> T:
    """Run `work`; out-of-memory errors are described."""
    try:
        return work()
    except Exception as error:
        cause = describe_oom(error, trainer)
        if cause is error:
            raise
        raise cause from None


def predicted_bytes(trainer: Trainer) -> int | None:
    rank = 0 if trainer.mesh is None else trainer.mesh.rank("world")
    try:
        return total(peak_rows(trainer.spec, rank, trainer.device.type))
    except SpecError:
        return None


def measured_bytes(trainer: Trainer) -> int | None:
    """What the run has added, as prediction.json counts it."""
    memory = getattr(trainer, "memory", None)  # set by `build`
    return memory.read() if memory is not None else None
