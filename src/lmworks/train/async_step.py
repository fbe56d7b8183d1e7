"""Async step: the passes of the next step are launched before the scalars of this one are read, so a GPU stays busy.

    host     update n │ passes n+1 │ wait for the scalars of n, check, write metrics │ update n+1 │ passes n+2 │ …
    device   passes n │ update n │ passes n+1                                        │ update n+1 │ …

An update is launched only after the step before it is settled. So limits, learning rate and everything else that a step
depends on are those of a synchronous run, and the result is bitwise the same. Launched passes are discarded if the
update before them was skipped, or the run stops.

Gradients of step n are freed before those of n + 1 are computed, as soon as the update of n is launched; memory does
not grow. A step whose update was skipped, and is taken after all, recomputes them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..data import Batch
from ..parallel.parallel_model import ParallelModel
from ..spec import RunSpec
from .health.bad_step_recovery import PassResult
from .health.stats import BlockStats
from .rng import set_rng_state


@dataclass(frozen=True)
class Counts:
    """Of a global batch."""

    units: int  # of the loss: what its sum is divided by
    tokens: int  # targets that count


@dataclass(frozen=True)
class LaunchedPasses:
    """Forward and backward passes of a step whose update is not launched yet."""

    batches: Sequence[Batch]
    counts: Counts
    sums: Tensor  # loss sum, squared gradient norm, and the scalars of every rank
    rng_before: dict[str, Tensor] | None  # with health.rerun
    stats: BlockStats | None  # of a step of health.stats_every


@dataclass(frozen=True)
class FailedLaunch:
    """Passes that could not be launched: an error of the next step, raised when that step begins."""

    batches: Sequence[Batch]
    error: Exception


class PassLauncher:
    """Launches the passes of a step, or those of the next one early; holds at most one step's."""

    def __init__(self, parallel_model: ParallelModel, launch: Callable[[Sequence[Batch]], LaunchedPasses]) -> None:
        self.parallel_model, self.launch = parallel_model, launch
        self.pending: LaunchedPasses | FailedLaunch | None = None  # of the next step
        self.pending_s = 0.0  # host seconds that launching them took

    def take(self, batches: Sequence[Batch]) -> LaunchedPasses:
        """The pending passes if they are of these batches; otherwise new ones."""
        pending = self.pending
        if pending is None or pending.batches is not batches:
            self.discard()
            return self.launch(batches)
        self.pending, self.pending_s = None, 0.0
        if isinstance(pending, FailedLaunch):
            raise pending.error
        return pending

    def launch_next(self, batches: Sequence[Batch]) -> None:
        """Queue the passes of the next step behind the update of this one."""
        began = time.perf_counter()
        self.parallel_model.after_step()
        self.parallel_model.zero_grad()
        try:
            self.pending = self.launch(batches)
        except Exception as error:
            self.pending = FailedLaunch(batches, error)
        self.pending_s = time.perf_counter() - began

    def discard(self) -> None:
        """Drop pending passes, with their gradients and the random numbers that they drew."""
        pending, self.pending = self.pending, None
        self.pending_s = 0.0
        if pending is not None:
            self.parallel_model.zero_grad()
        if isinstance(pending, LaunchedPasses) and pending.rng_before is not None:
            set_rng_state(pending.rng_before)


def recompute_gradients(launched: LaunchedPasses, result: PassResult, rerun: Callable[[], PassResult]) -> PassResult:
    """Compute the gradients of a skipped step again; those of the next step were in their place.

    The first result is the one that is checked, so that a hardware fault is not missed; unless it was finite and the
    second is not.
    """
    if launched.rng_before is not None:
        set_rng_state(launched.rng_before)
    second = rerun()
    if math.isfinite(result.loss + result.norm) and not math.isfinite(second.loss + second.norm):
        return second
    return replace(result, grad_divisor=second.grad_divisor)


def supports_async_step(spec: RunSpec) -> bool:
    """Not if passes depend on the end of the step before (the loss scale of fp16), count what it uses (expert loads),
    or if the host or DeepSpeed makes the update.
    """
    own = spec.parallel.engine == "native" and spec.parallel.offload == "none"
    return own and not spec.model.experts and spec.precision.dtype != "fp16"


def is_sync_point(spec: RunSpec, step: int) -> bool:
    """Whether the passes after `step` wait until it is over: the state between the two steps is read (checkpoint,
    evaluation, hashes), or statistics are made of one of the two.
    """
    between = spec.checkpoint.every, spec.log.eval_every, spec.health.hash_every, spec.log.suites_every
    statistics = spec.health.stats_every
    return any(every and step % every == 0 for every in between) or bool(
        statistics and (step % statistics == 0 or (step + 1) % statistics == 0)
    )
