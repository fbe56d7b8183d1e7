"""Traces of a spec's own steps: warm-up, then some steps under the profiler on every rank. Nothing is saved or
evaluated, and the loop is the trainer's, of any method.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..align.post_trainer import trainer_class
from ..data.progress import Progress, silent
from ..plan.devices.machine import Machine
from ..record import RunFolder
from ..record.profile_request import trace_path
from ..spec import RunSpec
from ..train import Trainer
from ..train.device import find_gpu, pick_device
from ..train.evaluate import Evaluation
from ..train.signals import Interrupted
from .calibrate import cached_machine
from .train import tolerate_bad_steps, weights_on_device, with_default_data, without_async_saves


def profile_train(
    spec: RunSpec, run_dir: Path, steps: int, warm_up: int, *, stacks: bool = False, force: bool = False,
    progress: Progress = silent,
) -> list[Path]:  # fmt: skip
    """Called on every rank; returns the traces of all of them."""
    spec = profiled_spec(spec, steps, warm_up, stacks)
    first, last = spec.log.profile
    machine = pricing_machine(spec) if int(os.environ.get("RANK", 0)) == 0 else None  # who writes predictions
    trainer = profiled_trainer(spec, last + 1, progress)(spec, run_dir, machine=machine, quiet=True, force=force)
    if isinstance(trainer, Trainer) and not spec.checkpoint.init and not spec.adapters:
        trainer.weights = weights_on_device(trainer.device, spec.seed)
    try:
        trainer.run()
    except Interrupted as error:  # there is nothing to resume
        stopped = str(error).partition(";")[0]
        error.args = (f"{stopped}; to record again, choose another --run-dir than {run_dir}",)
        raise
    return [trace_path(RunFolder(run_dir), rank, first, last) for rank in range(spec.parallel.world)]


def pricing_machine(spec: RunSpec) -> Machine | None:
    """What prices the ops: the fitted model of a known GPU, else the cached measurement of this machine."""
    gpu = find_gpu(spec.cluster, pick_device(spec.cluster))
    return Machine.of(gpu) if gpu is not None else cached_machine(spec.cluster)


def profiled_spec(spec: RunSpec, steps: int, warm_up: int, stacks: bool) -> RunSpec:
    spec = with_default_data(without_async_saves(tolerate_bad_steps(spec)))
    last = warm_up + steps
    log = spec.log.replace(
        profile=[warm_up + 1, last],
        profile_ranks=list(range(spec.parallel.world)),
        profile_stacks=stacks,
        eval_every=0,
        tensorboard=False,
        wandb="off",
    )
    optim = spec.optim.replace(steps=max(spec.optim.steps, last + 1))
    return spec.replace(log=log, optim=optim, checkpoint=spec.checkpoint.replace(every=0, remote=""))


def profiled_trainer(spec: RunSpec, steps: int, progress: Progress) -> type[Trainer]:
    """The trainer of the spec's method, that ends after `steps`: one more than are recorded, so that all ranks have
    written their traces, and checks of the last step are in none.
    """
    kind: Any = trainer_class(spec)
    if not issubclass(kind, Trainer):  # a rollout rank, which ends with its trainer
        return kind

    class ProfiledTrainer(kind):
        def is_last_step(self, values: dict[str, Any]) -> bool:
            return bool(self.step >= steps)

        def report(self, values: dict[str, Any]) -> None:
            progress("profiling" if self.step >= spec.log.profile[0] else "warm-up", self.step, steps)
            super().report(values)

        def evaluate(self) -> Evaluation:
            return Evaluation(math.nan, 0)

        def save(self, wait: bool = True) -> float:
            return 0.0

    return ProfiledTrainer
