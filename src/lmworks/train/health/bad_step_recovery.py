"""Recovery from a bad step: rerun it, record its origin and its data, and apply the configured action.

A step whose loss or gradient is not finite is always rerun, with hooks that find the first bad module. With
`health.rerun` a spike is too; if the second result is good, it is used: the hardware had failed, not the data or the
model. Every rank gets here with the same scalars, and does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ...data.window import describe
from ...parallel.world import collective_error
from ...spec import TrainingError
from ..rng import set_rng_state
from .bad_step import HealthIssue, StepRejected
from .nonfinite import FROM_WEIGHT, FirstNonfiniteModule, first_nonfinite

if TYPE_CHECKING:
    from ..step import Stepper


@dataclass(frozen=True)
class PassResult:
    """The scalars of the forward and backward passes of a step, the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    norm: float  # of the whole gradient, before clipping
    scale: float  # the loss scale
    memory: int  # the largest peak of any rank
    update_skipped: bool = True  # the device has skipped the update: a limit was exceeded
    grad_divisor: Tensor | None = None  # on the device of the gradients


def recover_bad_step(
    run: Stepper,
    issues: list[HealthIssue],
    result: PassResult,
    rerun: Callable[[], PassResult] | None = None,  # reruns the passes of the step
    rng_before: dict[str, Tensor] | None = None,  # random states before the passes
) -> PassResult:
    """The result to update the weights with; raises StepRejected, or the error that ends the run."""
    nonfinite = issues[0].kind == "nonfinite"
    if nonfinite:
        parameter, rank, where = first_nonfinite(run.parallel_model.shards, run.mesh)
        facts = {**issues[0].facts, "parameter": parameter, "rank": rank}
        issues = [replace(issues[0], where=where, facts=facts)]
    if rerun is not None and (nonfinite or run.spec.health.rerun):
        result, issues = rerun_step(run, issues, result, rerun, rng_before)
    for issue in issues:
        record_issue(run, issue)
    return apply_action(run, issues[0], result) if issues else result


def rerun_step(
    run: Stepper,
    issues: list[HealthIssue],
    result: PassResult,
    rerun: Callable[[], PassResult],
    rng_before: dict[str, Tensor] | None,
) -> tuple[PassResult, list[HealthIssue]]:
    """Rerun the step from the same random states. If the second result is good, the fault was transient."""
    nonfinite = issues[0].kind == "nonfinite"
    if rng_before is not None:
        set_rng_state(rng_before)
    run.parallel_model.clear()
    with FirstNonfiniteModule(run.parallel_model.parts) if nonfinite else nullcontext() as first:
        second = rerun()
    left = run.health.check_step(second.loss, second.norm, run.loss_scale.scale > 1)
    transient = not left
    if run.spec.health.rerun:
        same = repr((second.loss, second.norm)) == repr((result.loss, result.norm))
        figures = {"loss": result.loss, "grad_norm": result.norm, "again": [second.loss, second.norm]}
        reason = issues[0].kind
        run.event(
            "rerun", run.step + 1, reason=reason, transient=transient, same_bits=same, cursor=run.cursor, **figures
        )
        if transient:
            return second, []
    if first is None:
        return second, left
    module, rank = first.name(run.mesh)
    return result, [with_module(issues[0], module, rank if run.mesh else None, transient)]


def with_module(issue: HealthIssue, module: str | None, rank: int | None, transient: bool) -> HealthIssue:
    """Add the first bad module, unless a weight is bad; after a bad module every gradient is bad."""
    where, facts = issue.where, {**issue.facts, "module": module, "transient": transient}
    if module and not where.startswith(FROM_WEIGHT):
        where = f", first in the output of {module}" + ("" if rank is None else f" on rank {rank}")
        facts |= {"parameter": None, "rank": rank}
    if transient:
        where += "; computed again it is finite, so the machine failed, not the data"
    return replace(issue, where=where, facts=facts)


def record_issue(run: Stepper, issue: HealthIssue) -> None:
    """Write an event, with a description of the batch."""
    if run.lead:
        kind = "fault" if issue.kind == "nonfinite" else "spike"
        data = describe(run.batches, run.cursor)
        facts = {"reason": issue.kind, "action": issue.action, "cursor": run.cursor, **issue.facts}
        facts["what"] = issue.what + issue.where
        run.event(kind, run.step + 1, **facts, data=data)


def apply_action(run: Stepper, issue: HealthIssue, result: PassResult) -> PassResult:
    if issue.action == "log":
        return result
    tried = ""
    if issue.action != "stop":
        if not run.health.actions_exhausted(run.cursor):
            return skip_or_lower_lr(run, issue, result)
        health = run.spec.health
        tried = f" ({issue.action} did not help {health.max_actions} times within {health.window} steps)"
    run.parallel_model.clear()
    raise collective_error(
        TrainingError(
            f"step {run.step + 1}: {issue.what}{issue.where}{tried}; the step was not taken and the weights are as "
            f"they were; lower optim.lr in {run.folder.spec_path} and resume, or look at its data: "
            f"lmworks data window {run.folder.path} --cursor {run.cursor}"
        )
    )


def skip_or_lower_lr(run: Stepper, issue: HealthIssue, result: PassResult) -> PassResult:
    run.health.record_action(run.cursor)
    if issue.action == "lower_lr":
        run.health.lower_lr(run.step)
        memory = run.health.state
        run.event("lower_lr", run.step + 1, factor=memory.lr_factor, until=memory.lr_until, reason=issue.kind)
        if issue.kind != "nonfinite":
            return result  # the step is taken, at the lower rate
    run.parallel_model.clear()
    raise StepRejected(issue)
