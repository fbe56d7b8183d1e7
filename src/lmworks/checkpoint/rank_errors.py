"""Why something failed, told to every rank before any of them raises: nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..parallel.world import run_on_all_ranks


def first_reason(work: Callable[[], str | None]) -> tuple[str, int] | None:
    """Every rank does `work`, which returns why it failed; the first reason that any has, and whose it is."""
    reason = run_on_all_ranks(work)  # what it raises is no reason, but an error of ours: all raise it
    if not dist.is_initialized():
        return None if reason is None else (reason, 0)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(((found, rank) for rank, found in enumerate(reasons) if found is not None), None)
