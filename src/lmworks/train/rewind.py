"""After a rejected step: skip its data, or rewind to an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .. import checkpoint
from ..checkpoint.format.folders import discard
from ..parallel.world import collective_error, run_on_rank_zero
from ..spec import CheckpointError, TrainingError
from .health.bad_step import HealthIssue

if TYPE_CHECKING:
    from .trainer import Trainer


def rewind(trainer: Trainer, issue: HealthIssue) -> None:
    """Load a checkpoint from `health.rewind_steps` ago, and skip the data since then if they may be the cause.

    Checkpoints after it are deleted, but only after the state with its new cursor is saved: a run that is killed in
    between rewinds to the same place again.
    """
    corrupt = issue.kind == "corruption"  # every checkpoint was compared before it was saved, and the data are good
    taken, bad, now = trainer.step, trainer.cursor, trainer.health.state
    failed = taken if issue.taken else taken + 1
    # The last rewind target is sound: a new issue soon after lies in the data that followed, not further back.
    at_most = failed - 1 if corrupt else max(failed - trainer.spec.health.rewind_steps, now.rewound_to)
    root = trainer.folder.checkpoints
    trainer.checkpoints.wait_for_pending()
    target = run_on_rank_zero(lambda: newest_intact(root, at_most, trainer.checkpoints.record_refused))
    if target is None:
        raise collective_error(
            TrainingError(
                f"step {failed}: {issue.what}{issue.where}; health.{issue.kind} = 'rewind' found no checkpoint "
                f"of step {at_most} or before to go back to; use a smaller checkpoint.every or health.rewind_steps"
            )
        )
    trainer.load(target)
    trainer.health.carry_over(now)
    trainer.health.state.rewound_to = target
    trainer.event("rewind", failed, from_step=taken, to_step=target, reason=issue.kind)
    if not corrupt:
        trainer.skip_to(bad if issue.taken else bad + 1, issue.kind)  # after a taken step the cursor is past its data
    trainer.save()
    run_on_rank_zero(lambda: delete_after(root, target))


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
