"""The trainer on several forked ranks: many small runs per fork, because starting ranks takes most of the time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from lmworks.parallel import world
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.mesh import Mesh
from lmworks.parallel.world import run_on_rank_zero
from lmworks.record import RunFolder
from lmworks.spec import Grid, RunSpec, dump_toml
from lmworks.train import Trainer
from tiny import before_step, make_spec

MODEL = (
    "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.vocab=258", "data.micro_batch=1", "data.seq=16",
    "optim.steps=3", "checkpoint.every=2", "checkpoint.keep=0",
)  # fmt: skip
SPARSE = (
    "model.experts=4", "model.top_k=2", "model.expert_ffn=16", "model.balance_bias=0.01", "model.shared_experts=1"
)  # fmt: skip


def layout(data: Path, *overrides: str) -> RunSpec:
    """Two layers of width 32, 3 steps of 4 sequences, saved after steps 2 and 3."""
    return make_spec(data, *MODEL, *overrides)


@dataclass(frozen=True)
class Job:
    """A run to train; or, with `source`, a copy of a run whose last checkpoint was that of step `last`, to go on with.

    Under `save_first` it saves what it has loaded before it goes on: what arrived, in the words of its own layout.
    """

    folder: Path
    spec: RunSpec
    source: Path | None = None
    last: int = 0
    save_first: bool = False


def do(jobs: list[Job]) -> None:
    """Every job on as many ranks as its layout has; those of one size in one fork, smaller ones first."""
    for size in sorted({job.spec.parallel.world for job in jobs}):
        mine = [job for job in jobs if job.spec.parallel.world == size]
        if size == 1:
            do_here(0, mine)
        else:
            on_ranks(size, do_here, mine)


@cache
def mesh_of(grid: Grid, device_type: str) -> Mesh:
    return Mesh(grid, device_type)


def with_meshes(work: Callable[..., Any]) -> Callable[..., Any]:
    """Trainers of one layout share its process groups: making them takes longer than a small run."""
    return mock.patch.object(world, "Mesh", mesh_of)(work)


@with_meshes
def do_here(rank: int, jobs: list[Job]) -> None:
    for job in jobs:
        if job.source is None:
            trainer = Trainer(job.spec, job.folder, quiet=True)
        else:
            run_on_rank_zero(lambda job=job: copy_run(job))
            trainer = Trainer.resume(job.folder, quiet=True)
        if job.save_first:
            before_step(trainer, job.last + 1, trainer.save)
        trainer.run()


def copy_run(job: Job) -> None:
    """With the layout of the job, as if its spec.toml had been edited."""
    assert job.source is not None
    shutil.copytree(job.source, job.folder)
    for folder in (job.folder / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > job.last:
            shutil.rmtree(folder)
    RunFolder(job.folder).spec_path.write_text(dump_toml(job.spec.to_dict()))
