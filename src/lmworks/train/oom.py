"""Out of memory in a rank: which one, where, and what was predicted and measured of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..plan.memory.fit import peak_rows, total
from ..plan.memory.host_fit import gib
from ..record import phase
from ..record.life import where
from ..record.oom import OutOfMemory, asked_bytes, is_oom
from ..spec import SpecError

if TYPE_CHECKING:
    from .trainer import Trainer

T = TypeVar("T")


def named(error: Exception, trainer: Trainer) -> Exception:
    """The same error, or what it means where it is one of memory."""
    if isinstance(error, OutOfMemory) or not is_oom(error):
        return error
    place, asked = where(phase.name, phase.step), asked_bytes(error)
    traceback.clear_frames(error.__traceback__)  # they hold tensors, and what is left to do takes memory too
    predicted, measured = predicted_bytes(trainer), measured_bytes(trainer)
    much = f": {gib(asked)} more could not be allocated" if asked else ""
    figures = [
        f"predicted {gib(predicted)} at its peak" if predicted else "no peak was predicted",
        f"measured {gib(measured)}" if measured else "none was measured yet",
    ]
    who = "" if trainer.mesh is None else f"rank {trainer.mesh.rank('world')}: "
    began = trainer.began
    return OutOfMemory(
        f"{who}out of memory in {place}{much}; {', '.join(figures)} ({trainer.device.type})",
        predicted,
        measured,
        final=began is None or trainer.step == began,
    )


def naming(trainer: Trainer, work: Callable[[], T]) -> T:
    """Do `work`, which other ranks may have to hear about."""
    try:
        return work()
    except Exception as error:
        cause = named(error, trainer)
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
    """As prediction.json counts: what the run added."""
    memory = getattr(trainer, "memory", None)  # there is one from `build` on
    return memory.read() if memory is not None else None
