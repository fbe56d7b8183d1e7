"""Silent data corruption: replicas that differ are reported, and the run stops, or rewinds and replays.

Of two replicas neither has the majority. A replay then shows which ranks were faulty: those whose digest differs from
the one that all agree on now. If gradients were reduced since the fault, that is every rank, as the fault reached them
all; otherwise only one. If replicas differ again at the same step, the fault is permanent, and the run stops.
"""

from __future__ import annotations

from typing import Any

import torch

from ...parallel.parallel_model import ParallelModel
from ...parallel.world import collective_error
from ...spec import TrainingError
from ..position import EventRecorder, Position
from .bad_step import Health, HealthIssue, StepRejected
from .replicas import Digests, compare_replicas


def check_replicas(
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    health: Health,
    at: Position,
    recorder: EventRecorder,
) -> None:
    """Between two steps, and before every save, so that no unverified state is saved."""
    found, ranks = compare_replicas(parallel_model, optimizer)
    suspects = health.state.suspects
    replayed = suspects.get("step") == at.step
    if replayed:
        health.state.suspects = {}
    if not found:
        if replayed:
            recorder.event("rerun", at.step, reason="corruption", transient=True, ranks=faulty_ranks(suspects, ranks))
        return
    worst = max(found, key=lambda mismatch: len(mismatch.outliers))
    action = health.spec.corruption
    one = worst.outliers[0] if len(worst.outliers) == 1 else None
    names = worst.names[:8]  # after an update everything that the outlier touched differs
    fields = {"rank": one, "ranks": worst.outliers, "copies": worst.copies, "parameters": names, "action": action}
    recorder.event("corrupt", at.step, **fields)
    if action == "log":
        return
    again = "; it differed before the rewind, too: the fault is permanent" if replayed else ""
    if action == "stop" or replayed or health.actions_exhausted(at.cursor):
        raise collective_error(
            TrainingError(
                f"step {at.step}: {worst.what}{again}; nothing of this step was saved; take the machine of that rank "
                f"out (ranks count from 0) and resume: the newest checkpoint is from before"
            )
        )
    health.record_action(at.cursor)
    digests = {str(rank): digest for rank, digest in worst.digests.items()}  # as JSON has it
    health.state.suspects = {"step": at.step, "part": worst.part, "digests": digests}
    raise StepRejected(HealthIssue("corruption", "rewind", worst.what, taken=True))


def faulty_ranks(suspects: dict[str, Any], ranks: dict[int, Digests]) -> list[int]:
    """Ranks whose digest differs from the replay's; unknown if other ranks did the replay (fault.elastic)."""
    then = {int(rank): digest for rank, digest in suspects["digests"].items()}
    now = {rank: parts[suspects["part"]] for rank, parts in ranks.items() if suspects["part"] in parts}
    return [rank for rank in then if then[rank] != now[rank]] if then.keys() == now.keys() else []
