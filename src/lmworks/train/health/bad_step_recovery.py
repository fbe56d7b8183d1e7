"""Recovery from a bad step: rerun it, record its origin and its data, and apply the configured action, up to a rewind.

A step whose loss or gradient is not finite is always rerun, with hooks that find the first bad module. With
`health.rerun` a spike is too; if the second result is good, it is used: the hardware had failed, not the data or the
model. Every rank gets here with the same scalars, and does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ... import checkpoint
from ...checkpoint.format.folders import discard
from ...data.loader import BatchSource
from ...data.window import describe
from ...parallel.parallel_model import ParallelModel
from ...parallel.precision import LossScale
from ...parallel.world import collective_error, run_on_rank_zero
from ...spec import CheckpointError, TrainingError
from ..checkpoint_manager import CheckpointManager
from ..rng import set_rng_state
from ..train_state import EventRecorder, Position, skip_data
from .bad_step import Health, HealthIssue, StepRejected
from .nonfinite import FROM_WEIGHT, FirstNonfiniteModule, first_nonfinite


@dataclass(frozen=True)
class PassResult:
    """The scalars of the forward and backward passes of a step, the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    norm: float  # of the whole gradient, before clipping
    scale: float  # the loss scale
    memory: int  # the largest peak of any rank
    update_skipped: bool = True  # the device has skipped the update: a limit was exceeded
    grad_divisor: Tensor | None = None  # on the device of the gradients


@dataclass(frozen=True)
class BadStepRecovery:
    parallel_model: ParallelModel
    health: Health
    loss_scale: LossScale
    batches: BatchSource
    recorder: EventRecorder

    def recover(
        self,
        at: Position,
        issues: list[HealthIssue],
        result: PassResult,
        rerun: Callable[[], PassResult] | None = None,  # reruns the passes of the step
        rng_before: dict[str, Tensor] | None = None,  # random states before the passes
    ) -> PassResult:
        """The result to update the weights with; raises StepRejected, or the error that ends the run."""
        nonfinite = issues[0].kind == "nonfinite"
        if nonfinite:
            parameter, rank, where = first_nonfinite(self.parallel_model.shards)
            facts = {**issues[0].facts, "parameter": parameter, "rank": rank}
            issues = [replace(issues[0], where=where, facts=facts)]
        if rerun is not None and (nonfinite or self.health.spec.rerun):
            result, issues = self.rerun_step(at, issues, result, rerun, rng_before)
        for issue in issues:
            self.record_issue(at, issue)
        return self.apply_action(at, issues[0], result) if issues else result

    def rerun_step(
        self,
        at: Position,
        issues: list[HealthIssue],
        result: PassResult,
        rerun: Callable[[], PassResult],
        rng_before: dict[str, Tensor] | None,
    ) -> tuple[PassResult, list[HealthIssue]]:
        """Rerun the step from the same random states. If the second result is good, the fault was transient."""
        reason, mesh = issues[0].kind, self.parallel_model.mesh
        if rng_before is not None:
            set_rng_state(rng_before)
        self.parallel_model.zero_grad()
        with FirstNonfiniteModule(self.parallel_model.parts) if reason == "nonfinite" else nullcontext() as first:
            second = rerun()
        left = self.health.check_step(second.loss, second.norm, self.loss_scale.scale > 1)
        transient = not left
        if self.health.spec.rerun:
            same = repr((second.loss, second.norm)) == repr((result.loss, result.norm))
            fields = {"reason": reason, "transient": transient, "same_bits": same, "cursor": at.cursor}
            fields |= {"loss": result.loss, "grad_norm": result.norm, "again": [second.loss, second.norm]}
            self.recorder.event("rerun", at.step + 1, **fields)
            if transient:
                return second, []
        if first is None:
            return second, left
        module, rank = first.name()
        return result, [with_module(issues[0], module, rank if mesh else None, transient)]

    def record_issue(self, at: Position, issue: HealthIssue) -> None:
        """Write an event, with a description of the batch."""
        if self.recorder.is_rank_zero:
            kind = "fault" if issue.kind == "nonfinite" else "spike"
            data = describe(self.batches, at.cursor)
            facts = {"reason": issue.kind, "action": issue.action, "cursor": at.cursor, **issue.facts}
            facts["what"] = issue.what + issue.where
            self.recorder.event(kind, at.step + 1, **facts, data=data)

    def apply_action(self, at: Position, issue: HealthIssue, result: PassResult) -> PassResult:
        if issue.action == "log":
            return result
        tried = ""
        if issue.action != "stop":
            if not self.health.actions_exhausted(at.cursor):
                return self.skip_or_lower_lr(at, issue, result)
            spec = self.health.spec
            tried = f" ({issue.action} did not help {spec.max_actions} times within {spec.window} steps)"
        self.parallel_model.zero_grad()
        folder = self.recorder.folder
        raise collective_error(
            TrainingError(
                f"step {at.step + 1}: {issue.what}{issue.where}{tried}; the step was not taken and the weights are as "
                f"they were; lower optim.lr in {folder.spec_path} and resume, or look at its data: "
                f"lmworks data window {folder.path} --cursor {at.cursor}"
            )
        )

    def skip_or_lower_lr(self, at: Position, issue: HealthIssue, result: PassResult) -> PassResult:
        self.health.record_action(at.cursor)
        if issue.action == "lower_lr":
            self.health.lower_lr(at.step)
            state = self.health.state
            self.recorder.event(
                "lower_lr", at.step + 1, factor=state.lr_factor, until=state.lr_until, reason=issue.kind
            )
            if issue.kind != "nonfinite":
                return result  # the step is taken, at the lower rate
        self.parallel_model.zero_grad()
        raise StepRejected(issue)


def with_module(issue: HealthIssue, module: str | None, rank: int | None, transient: bool) -> HealthIssue:
    """Add the first bad module, unless a weight is bad; after a bad module every gradient is bad."""
    where, facts = issue.where, {**issue.facts, "module": module, "transient": transient}
    if module and not where.startswith(FROM_WEIGHT):
        where = f", first in the output of {module}" + ("" if rank is None else f" on rank {rank}")
        facts |= {"parameter": None, "rank": rank}
    if transient:
        where += "; the rerun is finite, so the hardware failed, not the data"
    return replace(issue, where=where, facts=facts)


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
    # The last rewind target is sound: a new issue soon after comes from the data that followed, not from further back.
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
