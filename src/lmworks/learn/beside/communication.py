"""Collectives beside the planner's schedules of messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from .rows import Beside, Row


def sent(kind: str, call: Callable[[ModuleType, Any, Any], Any], buffer: int = 840) -> Beside:
    """`call` sends a buffer of so many numbers, or the rank's part of it where all ranks gather."""

    def rows(module: ModuleType) -> list[Row]:
        import torch

        from ...plan.collective_algorithms.schedules import schedule
        from ..checks.simulated_ranks import on_ranks

        found = []
        for ranks in (2, 8):
            x = torch.ones(buffer // ranks if kind == "all_gather" else buffer)
            _, network = on_ranks("bytes sent", [x] * ranks, partial(call, module))
            planned = 4 * buffer * schedule(kind, "ring", ranks).most_sent
            found.append(
                Row(f"{kind} of {4 * buffer:,} bytes over {ranks} ranks: bytes sent", max(network.bytes_sent), planned)
            )
        return found

    return rows


def zero2(module: ModuleType, x: Any, link: Any) -> Any:
    return module.zero2_step(x, x, x[: len(x) // link.ranks], 0.1, link)


def alpha_beta(cost: ModuleType) -> list[Row]:
    """Each round of a schedule costs α, and β for its largest message."""
    from ...plan.collective_algorithms.schedules import schedule

    rows, alpha, beta = [], 5.0, 1e-3  # in µs
    for name, yours in (("ring", cost.ring_seconds), ("tree", cost.tree_seconds)):
        for nbytes in (1_000, 1_000_000):
            plan = schedule("all_reduce", name, 16)
            ours = sum(
                alpha + beta * nbytes * max(len(move.chunks) for move in turn) / plan.chunks for turn in plan.rounds
            )
            rows.append(Row(f"{name} over 16 ranks, {nbytes:,} bytes: µs", yours(16, nbytes, alpha, beta), ours))
    return rows


BESIDE: dict[str, Beside] = {
    "reduce_scatter": sent("reduce_scatter", lambda module, x, link: module.ring_reduce_scatter(x, link)),
    "all_gather": sent("all_gather", lambda module, x, link: module.ring_all_gather(x, link)),
    "ring_all_reduce": sent("all_reduce", lambda module, x, link: module.ring_all_reduce(x, link)),
    "zero2": sent("all_reduce", zero2),
    "alpha_beta": alpha_beta,
}
