"""Silent data corruption: replicas that differ are reported, and the run stops, or rewinds and replays.

Of two replicas neither has the majority. A replay then shows which ranks were faulty: those whose digest differs from
the one that all agree on now. If gradients were reduced since the fault, that is every rank, as the fault reached them
all; otherwise only one. If replicas differ again at the same step, the fault is permanent, and the run stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...parallel.world import collective_error
from ...spec import TrainingError
from .bad_step import HealthIssue, StepRejected
from .replicas import Digests, ReplicaMismatch, compare_replicas

if TYPE_CHECKING:
    from ..step import Stepper


def check_replicas(run: Stepper) -> None:
    """Between two steps, and before every save, so that no unverified state is saved."""
    found, ranks = compare_replicas(run.parallel_model, run.optimizer)
    suspects = run.health.state.suspects
    replayed = suspects.get("step") == run.step
    if replayed:
        run.health.state.suspects = {}
    if not found:
        if replayed:
            run.event("rerun", reason="corruption", transient=True, ranks=faulty_ranks(suspects, ranks))
        return
    worst = max(found, key=lambda mismatch: len(mismatch.outliers))
    action = run.spec.health.corruption
    one = worst.outliers[0] if len(worst.outliers) == 1 else None
    names = worst.names[:8]  # after an update everything that the outlier touched differs
    run.event("corrupt", rank=one, ranks=worst.outliers, copies=worst.copies, parameters=names, action=action)
    if action == "log":
        return
    again = "; it differed before the rewind, too: the fault is permanent" if replayed else ""
    if action == "stop" or replayed or run.health.actions_exhausted(run.cursor):
        raise collective_error(
            TrainingError(
                f"step {run.step}: {worst.what}{again}; nothing of this step was saved; take the machine of that rank "
                f"out (ranks count from 0) and resume: the newest checkpoint is from before"
            )
        )
    request_rewind(run, worst)


def faulty_ranks(suspects: dict[str, Any], ranks: dict[int, Digests]) -> list[int]:
    """Ranks whose digest differs from the replay's; unknown if other ranks did the replay (fault.elastic)."""
    then = {int(rank): digest for rank, digest in suspects["digests"].items()}
    now = {rank: parts[suspects["part"]] for rank, parts in ranks.items() if suspects["part"] in parts}
    return [rank for rank in then if then[rank] != now[rank]] if then.keys() == now.keys() else []


def request_rewind(run: Stepper, mismatch: ReplicaMismatch) -> None:
    run.health.record_action(run.cursor)
    digests = {str(rank): digest for rank, digest in mismatch.digests.items()}  # as JSON has it
    run.health.state.suspects = {"step": run.step, "part": mismatch.part, "digests": digests}
    raise StepRejected(HealthIssue("corruption", "rewind", mismatch.what, taken=True))
