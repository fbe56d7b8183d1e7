"""The passes of the next step, launched before the figures of this one are read: a GPU always has work in its queue.

    host     update n │ passes n+1 │ wait for the figures of n, judge, write metrics │ update n+1 │ passes n+2 │ …
    device   passes n │ update n │ passes n+1                                        │ update n+1 │ …

An update is launched only after the step before it is settled. So limits, learning rate and everything else that a step
follows from are those of a run that waits, and it computes the same bits. What was launched ahead is thrown away where
the step before it was held back or the run stops: it began from weights that are to change, or is not wanted.

Gradients of step n make room for those of n + 1 as soon as the update of n is launched; memory does not grow. A step
that was held and is taken all the same computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..data import Batch
from ..record import phase
from ..spec import RunSpec
from .health.bad_step_recovery import Passed
from .health.stats import BlockStats
from .rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from .step import Stepper


@dataclass(frozen=True)
class Started:
    """Passes that are on their way, of a step whose update was not launched yet."""

    batches: Sequence[Batch]
    tokens: int  # of the global batch that count
    sums: Tensor  # of loss and squared norm, and what the ranks say of themselves
    drawn: dict[str, Tensor] | None  # the random states that they began with, where they may be wanted
    stats: BlockStats | None  # of a step of health.stats_every


@dataclass(frozen=True)
class Failed:
    """Passes that could not be launched ahead: an error of the step to come, not of the one under way."""

    batches: Sequence[Batch]
    error: Exception


# --- the passes -----------------------------------------------------------------------------------------


def started(run: Stepper, batches: Sequence[Batch]) -> Started:
    """Passes over these batches: those that are under way, or new ones."""
    ahead = run.ahead
    if ahead is None or ahead.batches is not batches:
        drop(run)
        return start(run, batches)
    run.ahead = None
    if isinstance(ahead, Failed):
        raise ahead.error
    return ahead


def start(run: Stepper, batches: Sequence[Batch]) -> Started:
    # The loss is a mean over the tokens of the global batch, so every micro-batch on every rank is divided by that
    # count, not by its own: uneven ones then weigh as their tokens do.
    tokens = run.count_tokens(batches)
    drawn = rng_state() if run.spec.health.rerun else None
    stats = BlockStats(run.parallel_model) if run.is_due(run.spec.health.stats_every) else None
    with stats or nullcontext():
        return Started(batches, tokens, run.passes(batches, tokens), drawn, stats)


def look_ahead(run: Stepper, batches: Sequence[Batch]) -> None:
    """Launch the passes of the next step behind the update of this one."""
    run.parallel_model.after_step()
    run.parallel_model.clear()
    try:
        run.ahead = start(run, batches)
    except Exception as error:
        run.ahead = Failed(batches, error)
    phase.enter("optimizer", run.step + 1)  # this step is what is waited for


def drop(run: Stepper) -> None:
    """What was launched ahead is not wanted."""
    ahead, run.ahead = run.ahead, None
    if ahead is not None:
        run.parallel_model.clear()
    if isinstance(ahead, Started) and ahead.drawn is not None:
        set_rng_state(ahead.drawn)


def regain(run: Stepper, now: Started, passed: Passed, again: Callable[[], Passed]) -> Passed:
    """The gradients of a step that was held, in place of those of the next. What is judged stays what was found first,
    so that a fault of the machine does not pass unseen; unless that was finite and this is not.
    """
    drop(run)
    if now.drawn is not None:
        set_rng_state(now.drawn)
    second = again()
    if math.isfinite(passed.loss + passed.norm) and not math.isfinite(second.loss + second.norm):
        return second
    return replace(passed, divisor=second.divisor)


# --- when ----------------------------------------------------------------------------------------------


def may_look_ahead(spec: RunSpec) -> bool:
    """Not where passes follow from how the step before ended (the scale of fp16), count something that it uses (loads
    of experts), or have their update made by the host or by DeepSpeed.
    """
    own = spec.parallel.engine == "native" and spec.parallel.offload == "none"
    return own and not spec.model.experts and spec.precision.dtype != "fp16"


def stands_alone(spec: RunSpec, step: int) -> bool:
    """Whether the passes after `step` wait until it is over: somebody looks at the state between the two steps, or at
    one of the two as a whole.
    """
    between = spec.checkpoint.every, spec.log.eval_every, spec.health.hash_every
    statistics, profiled = spec.health.stats_every, spec.log.profile or (0, 0)
    return (
        any(every and step % every == 0 for every in between)
        or bool(statistics and (step % statistics == 0 or (step + 1) % statistics == 0))
        or step in (profiled[0] - 1, profiled[1])
    )
