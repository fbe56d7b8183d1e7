"""Pictures of the memory of training: what is kept, and what sharding and recomputing save."""

from __future__ import annotations

from collections.abc import Callable

from ...record.formatting import binary_bytes
from ..drawing import Drawing
from ..what_if import Setting, answer

PARTS = (("weights", "blue"), ("gradients", "green"), ("optimizer", "orange"), ("activations", "red"))


def memory_anatomy() -> Drawing:
    """By the planner; the rest of what the allocator reserves is left out."""
    picture, rows = Drawing(640, 130), []
    for recompute in ("none", "selective", "full"):
        found = answer(Setting(ranks="64", zero="3", micro_batch="4", micro_batches="1", recompute=recompute))
        parts = [(float(getattr(found, name)), shade) for name, shade in PARTS]
        rows.append((f"recompute {recompute}", parts, binary_bytes(sum(value for value, _ in parts))))
    picture.bars(10, 10, 620, rows, label=150)
    picture.legend(160, 120, PARTS)
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {"memory_anatomy": memory_anatomy}
