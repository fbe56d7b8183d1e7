"""Exchange of failures between ranks before any of them raises, so that none hangs in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..parallel.world import run_on_all_ranks


def first_failure(work: Callable[[], str | None]) -> tuple[str, int] | None:
    """Run `work` on all ranks, which returns why it failed or None; returns the first reason, and its rank."""
    reason = run_on_all_ranks(work)  # an exception is raised by all
    if not dist.is_initialized():
        return None if reason is None else (reason, 0)
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(((found, rank) for rank, found in enumerate(reasons) if found is not None), None)
