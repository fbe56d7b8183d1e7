"""Facing a bad step: compute it again, say where it began and on what data, and act.

A step whose loss or gradient is not finite is always computed once more, with hooks that name the first bad module.
With `health.rerun` a spike is too, and what comes out right the second time is taken: the machine had failed, not the
data or the model. Every rank comes here with the same figures, and does the same.
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
from .bad_step import NotTaken, Trouble
from .nonfinite import FROM_WEIGHT, FirstBadModule, first_nonfinite

if TYPE_CHECKING:
    from ..step import Stepper


@dataclass(frozen=True)
class Passed:
    """What the forward and backward passes of a step gave, alike on every rank."""

    loss: float  # mean over the tokens of the global batch
    norm: float  # of the whole gradient, before clipping
    scale: float  # what the loss was multiplied by
    memory: int  # the largest peak of any rank
    held: bool = True  # the weights were not updated with these figures: they may be trouble
    divisor: Tensor | None = None  # of the gradients, where they are


def face(
    run: Stepper,
    troubles: list[Trouble],
    passed: Passed,
    again: Callable[[], Passed] | None = None,  # computes the step's passes once more
    drawn: dict[str, Tensor] | None = None,  # the random states that they began with
) -> Passed:
    """The passes to update the weights with; or NotTaken, or the error that ends the run."""
    nonfinite = troubles[0].kind == "nonfinite"
    if nonfinite:
        parameter, rank, where = first_nonfinite(run.parallel_model.shards, run.mesh)
        facts = {**troubles[0].facts, "parameter": parameter, "rank": rank}
        troubles = [replace(troubles[0], where=where, facts=facts)]
    if again is not None and (nonfinite or run.spec.health.rerun):
        passed, troubles = look_again(run, troubles, passed, again, drawn)
    for trouble in troubles:
        tell(run, trouble)
    return act(run, troubles[0], passed) if troubles else passed


def look_again(
    run: Stepper,
    troubles: list[Trouble],
    passed: Passed,
    again: Callable[[], Passed],
    drawn: dict[str, Tensor] | None,
) -> tuple[Passed, list[Trouble]]:
    """The step once more, from the same random states. Without trouble the second time, it was the machine's."""
    nonfinite = troubles[0].kind == "nonfinite"
    if drawn is not None:
        set_rng_state(drawn)
    run.parallel_model.clear()
    with FirstBadModule(run.parallel_model.parts) if nonfinite else nullcontext() as first:
        second = again()
    left = run.health.judge(second.loss, second.norm, run.loss_scale.scale > 1)
    transient = not left
    if run.spec.health.rerun:
        same = repr((second.loss, second.norm)) == repr((passed.loss, passed.norm))
        figures = {"loss": passed.loss, "grad_norm": passed.norm, "again": [second.loss, second.norm]}
        reason = troubles[0].kind
        run.event(
            "rerun", run.step + 1, reason=reason, transient=transient, same_bits=same, cursor=run.cursor, **figures
        )
        if transient:
            return second, []
    if first is None:
        return second, left
    module, rank = first.name(run.mesh)
    return passed, [by_module(troubles[0], module, rank if run.mesh else None, transient)]


def by_module(trouble: Trouble, module: str | None, rank: int | None, transient: bool) -> Trouble:
    """A bad weight explains itself; after a bad module every gradient is bad, and none of them tells anything."""
    where, facts = trouble.where, {**trouble.facts, "module": module, "transient": transient}
    if module and not where.startswith(FROM_WEIGHT):
        where = f", first in the output of {module}" + ("" if rank is None else f" on rank {rank}")
        facts |= {"parameter": None, "rank": rank}
    if transient:
        where += "; computed again it is finite, so the machine failed, not the data"
    return replace(trouble, where=where, facts=facts)


def tell(run: Stepper, trouble: Trouble) -> None:
    """Into events.jsonl, with what lay in the batch."""
    if run.lead:
        kind = "fault" if trouble.kind == "nonfinite" else "spike"
        data = describe(run.batches, run.cursor)
        facts = {"reason": trouble.kind, "action": trouble.action, "cursor": run.cursor, **trouble.facts}
        facts["what"] = trouble.what + trouble.where
        run.event(kind, run.step + 1, **facts, data=data)


def act(run: Stepper, trouble: Trouble, passed: Passed) -> Passed:
    if trouble.action == "log":
        return passed
    tried = ""
    if trouble.action != "stop":
        if not run.health.exhausted(run.cursor):
            return remedy(run, trouble, passed)
        health = run.spec.health
        tried = f" ({trouble.action} did not help {health.max_actions} times within {health.window} steps)"
    run.parallel_model.clear()
    raise collective_error(
        TrainingError(
            f"step {run.step + 1}: {trouble.what}{trouble.where}{tried}; the step was not taken and the weights are as "
            f"they were; lower optim.lr in {run.folder.spec_path} and resume, or look at its data: "
            f"lmworks data window {run.folder.path} --cursor {run.cursor}"
        )
    )


def remedy(run: Stepper, trouble: Trouble, passed: Passed) -> Passed:
    run.health.note(run.cursor)
    if trouble.action == "lower_lr":
        run.health.lower(run.step)
        memory = run.health.memory
        run.event("lower_lr", run.step + 1, factor=memory.lr_factor, until=memory.lr_until, reason=trouble.kind)
        if trouble.kind != "nonfinite":
            return passed  # the step is taken, at the lower rate
    run.parallel_model.clear()
    raise NotTaken(trouble)
