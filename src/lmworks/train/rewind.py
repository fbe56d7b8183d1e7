"""After a rejected step: rewind to an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import checkpoint
from ..checkpoint.format.folders import discard
from ..parallel.world import collective_error, run_on_rank_zero
from ..spec import CheckpointError, TrainingError
from .checkpoint_manager import CheckpointManager
from .health.bad_step import Health, HealthIssue
from .position import EventRecorder, Position, skip_data


def rewind(
    issue: HealthIssue, at: Position, health: Health, checkpoints: CheckpointManager, recorder: EventRecorder
) -> Position:
    """Load a checkpoint from `health.rewind_steps` ago, and skip the data since then if they may be the cause.

    Returns the new position. Checkpoints after it are deleted, but only after the state with its new cursor is saved: a
    run that is killed in between rewinds to the same place again.
    """
    corrupt = issue.kind == "corruption"  # every checkpoint was compared before it was saved, and the data are good
    now = health.state
    failed = at.step if issue.taken else at.step + 1
    # The last rewind target is sound: a new issue soon after lies in the data that followed, not further back.
    at_most = failed - 1 if corrupt else max(failed - health.spec.rewind_steps, now.rewound_to)
    checkpoints.wait_for_pending()
    target = run_on_rank_zero(lambda: newest_intact(checkpoints.root, at_most, checkpoints.record_refused))
    position = checkpoints.load(target) if target is not None else None
    if position is None:
        raise collective_error(
            TrainingError(
                f"step {failed}: {issue.what}{issue.where}; health.{issue.kind} = 'rewind' found no checkpoint "
                f"of step {at_most} or before to go back to; use a smaller checkpoint.every or health.rewind_steps"
            )
        )
    health.carry_over(now)
    health.state.rewound_to = position.step
    recorder.event("rewind", failed, from_step=at.step, to_step=position.step, reason=issue.kind)
    if not corrupt:  # after a taken step the cursor is past its data
        position = skip_data(position, at.cursor if issue.taken else at.cursor + 1, issue.kind, recorder)
    checkpoints.save(position, wait=True)
    run_on_rank_zero(lambda: delete_after(checkpoints.root, position.step))
    return position


def newest_intact(root: Path, at_most: int, refused: Callable[[Path, str], None]) -> int | None:
    for folder in checkpoint.committed(root):
        step = checkpoint.step_of(folder)
        if step > at_most:
            continue
        try:
            checkpoint.verify(folder)
        except CheckpointError as error:
            refused(folder, str(error))
        else:
            return step
    return None


def delete_after(root: Path, step: int) -> None:
    """Newest first: a run that is killed in between is left at an earlier step of the same history."""
    for folder in checkpoint.folders(root):
        if checkpoint.step_of(folder) > step:
            discard(folder)
