"""Until the closed form of a pipeline's waits lands: a rough one."""

from __future__ import annotations

from .case import Number


def rough_bubble(schedule: str, ranks: Number, virtual: Number, micro_batches: Number, work: Number) -> Number:
    """Idle seconds of a rank with `work` seconds a micro-batch."""
    return (ranks - 1) * work / (virtual if schedule != "1f1b" else 1)
