"""Going on after a step that was not taken: past its data, or from an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .. import checkpoint
from ..checkpoint.format.folders import discard
from ..parallel.world import collective_error, run_on_rank_zero
from ..spec import CheckpointError, TrainingError
from .health.bad_step import NotTaken, Trouble

if TYPE_CHECKING:
    from .trainer import Trainer


def move_on(trainer: Trainer, refused: NotTaken, seconds: float) -> None:
    """`seconds`: what the step took that was not taken."""
    trouble = refused.trouble
    if trouble.action == "rewind":
        rewind(trainer, trouble)
    else:
        skip(trainer, trainer.cursor + 1, trouble.kind, seconds=round(seconds, 4))


def skip(trainer: Trainer, to: int, reason: str, **fields: float) -> None:
    """The windows from the cursor up to `to` are not trained on."""
    trainer.event("skip", trainer.step + 1, from_cursor=trainer.cursor, to_cursor=to, reason=reason, **fields)
    trainer.cursor = to


def rewind(trainer: Trainer, trouble: Trouble) -> None:
    """Back to a checkpoint of `health.rewind_steps` ago, and past the data since then if they may be at fault.

    What was saved after that checkpoint belongs to a line that is given up. The state gone back to is saved with its
    new cursor first, and only then is that line removed: killed in between, the run comes to the same place again.
    """
    corrupt = trouble.kind == "corruption"  # every checkpoint was compared before it was saved, and the data are good
    taken, bad, now = trainer.step, trainer.cursor, trainer.health.memory
    failed = taken if trouble.taken else taken + 1
    # What was gone back to is sound: a trouble soon after lies in the data that followed, not further back.
    at_most = failed - 1 if corrupt else max(failed - trainer.spec.health.rewind_steps, now.rewound_to)
    root = trainer.folder.checkpoints
    trainer.saving.settle()
    target = run_on_rank_zero(lambda: newest_intact(root, at_most, trainer.saving.refused))
    if target is None:
        raise collective_error(
            TrainingError(
                f"step {failed}: {trouble.what}{trouble.where}; health.{trouble.kind} = 'rewind' found no checkpoint "
                f"of step {at_most} or before to go back to; use a smaller checkpoint.every or health.rewind_steps"
            )
        )
    trainer.load(target)
    trainer.health.remember(now)
    trainer.health.memory.rewound_to = target
    trainer.event("rewind", failed, from_step=taken, to_step=target, reason=trouble.kind)
    if not corrupt:
        skip(trainer, bad if trouble.taken else bad + 1, trouble.kind)  # the cursor has passed what was taken
    trainer.save()
    run_on_rank_zero(lambda: drop_after(root, target))


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


def drop_after(root: Path, step: int) -> None:
    """The newest first: killed in between, what is left is a run that stands earlier on the same line."""
    for folder in checkpoint.folders(root):
        if checkpoint.step_of(folder) > step:
            discard(folder)
