"""Where the workers of a sweep run: options of `sweep`, `tune` and `scaling run`, and the pool that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..spec import SpecError

if TYPE_CHECKING:
    from ..sweep.folder import Sweep
    from ..sweep.pool import Workers
    from ..sweep.slurm import Array

WorkerCount = Annotated[
    int | None, typer.Option("--workers", min=1, help="Trials at a time (by default as many as fit).")
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads of each rank of a trial.")]
TrialsPerGpu = Annotated[int, typer.Option("--trials-per-gpu", min=1, help="Trials that share a GPU.")]
Slurm = Annotated[bool, typer.Option("--slurm", help="Submit the workers to Slurm, as an array.")]
SlurmTime = Annotated[str, typer.Option("--time", help="With --slurm: time limit, e.g. 4:00:00.")]
SlurmPartition = Annotated[str, typer.Option("--partition", help="With --slurm: partition to run in.")]
SbatchLines = Annotated[
    list[str] | None,
    typer.Option("--sbatch-line", metavar="OPTION", help="With --slurm: one more #SBATCH line; may be repeated."),
]
Ray = Annotated[bool, typer.Option("--ray", help="Run the workers on Ray, local or at RAY_ADDRESS.")]


@dataclass(frozen=True)
class WorkerOptions:
    workers: int | None = None
    trials_per_gpu: int = 1
    slurm: bool = False
    time: str = ""
    partition: str = ""
    lines: tuple[str, ...] = ()
    ray: bool = False

    def __post_init__(self) -> None:
        if self.slurm and self.ray:
            raise SpecError("--slurm and --ray both say where the workers run; give one of them")
        if not self.slurm and (self.time or self.partition or self.lines):
            raise SpecError("--time, --partition and --sbatch-line are Slurm's; add --slurm")

    def check(self, ranks: int, threads: int, on_gpus: bool) -> None:
        """Refuse what no machine has room for, before a sweep is made."""
        if self.ray:
            from ..sweep.ray import connect

            connect(ranks * threads, ranks * on_gpus)
        elif not self.slurm:
            from ..sweep.slots import own_resources, visible_gpus

            resources = own_resources(visible_gpus() if on_gpus else (), self.trials_per_gpu)
            resources.check(self.workers or 1, ranks, threads)

    def array(self, sweep: Sweep, most: int, ranks: int, on_gpus: bool) -> Array:
        from ..sweep.slurm import Array

        cores, gpus = ranks * sweep.threads, ranks * on_gpus
        return Array(self.workers or most, cores, gpus, self.time, self.partition, lines=self.lines)

    def pool(self, sweep: Sweep, most: int, ranks: int, on_gpus: bool) -> Workers:
        """At most `most` workers, of trials with so many ranks."""
        from ..sweep.pool import Workers
        from ..sweep.ray import RayWorkers, free_slots
        from ..sweep.slots import own_resources, visible_gpus
        from ..sweep.slurm import SlurmWorkers

        cores, gpus = ranks * sweep.threads, ranks * on_gpus
        if self.slurm:
            return SlurmWorkers(sweep, self.array(sweep, most, ranks, on_gpus))
        if self.ray:
            return RayWorkers(sweep, self.workers or min(most, free_slots(cores, gpus)), cores, gpus)
        resources = own_resources(visible_gpus() if on_gpus else (), self.trials_per_gpu)
        count = self.workers or min(most, resources.workers(ranks, sweep.threads))
        return Workers(sweep, count, ["--trials-per-gpu", str(self.trials_per_gpu)], resources)
