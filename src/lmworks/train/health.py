"""Where a number that is not finite began."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..parallel.data import Shard
from ..parallel.mesh import Mesh


def first_nonfinite(shards: list[Shard], mesh: Mesh | None) -> tuple[str | None, str]:
    """The weight that is not finite, or the gradient in which it began, on whichever rank; and how to say it."""
    weight = next((shard.name for shard in shards if not shard.leaf.isfinite().all()), None)
    # Backward runs from the last parameter to the first, so the last bad gradient is where it began.
    broken = (s.name for s in reversed(shards) if s.leaf.grad is not None and not s.leaf.grad.isfinite().all())
    names = [(weight, next(broken, None))]
    if mesh is not None:
        everywhere: list[Any] = [None] * mesh.size("world")
        dist.all_gather_object(everywhere, names[0])
        names = everywhere
    for found in (pair[0] for pair in names):
        if found:
            return found, f", from the weight {found}"
    for found in (pair[1] for pair in reversed(names)):
        if found:
            return found, f", first in the gradient of {found}"
    return None, ""
