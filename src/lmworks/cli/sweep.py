"""`lmworks sweep`: run every point of a space, by workers on this machine or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..record.parent_death import until_this_process_ends
from ..spec import SpecError
from ..spec.files import unsafe_name
from .groups import DefaultCommandGroup
from .options import Overrides, Spec
from .output import Json, print_json
from .sweep_workers import (
    Ray,
    SbatchLines,
    Slurm,
    SlurmPartition,
    SlurmTime,
    Threads,
    TrialsPerGpu,
    WorkerCount,
    WorkerOptions,
)

if TYPE_CHECKING:
    from ..sweep.folder import Sweep
    from ..sweep.pool import Workers
    from ..sweep.slurm import Array
    from ..sweep.space import Point

SpaceFile = Annotated[
    Path, typer.Option("--space", metavar="SPACE.toml", help="Which keys take which values (docs/sweeps.md).")
]
SweepDir = Annotated[Path, typer.Argument(metavar="SWEEP", help="The folder of a sweep, or its name below sweeps/.")]


class SpecOrCommand(DefaultCommandGroup):
    """`lmworks sweep SPEC …` is `lmworks sweep run SPEC …`."""

    default_command = "run"


app = typer.Typer(
    cls=SpecOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run many trials of one spec: every point of a space.",
)


@app.command()
def run(
    spec: Spec,
    space: SpaceFile,
    overrides: Overrides = None,
    workers: WorkerCount = None,
    name: Annotated[str, typer.Option("--name", help="The sweep is kept in sweeps/NAME (by default the spec's).")] = "",
    threads: Threads = 1,
    trials_per_gpu: TrialsPerGpu = 1,
    slurm: Slurm = False,
    time: SlurmTime = "",
    partition: SlurmPartition = "",
    sbatch_line: SbatchLines = None,
    ray: Ray = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Go on with trials that failed, too.")] = False,
    json: Json = False,
) -> None:
    """Run every point of a space, each as a run of its own.

    The same command goes on with a sweep that was stopped or killed; what has finished is not repeated.

    \b
    Examples:
      lmworks sweep configs/tiny.toml --space space.toml
      lmworks sweep configs/tiny.toml --space space.toml optim.steps=50 --workers 2 --name lr
      lmworks sweep configs/tiny.toml --space space.toml --slurm --workers 16 --time 4:00:00 --sbatch-line=--mem=8G
      lmworks sweep configs/tiny.toml --space space.toml --ray --workers 16
    """
    from ..sweep.folder import SWEEPS_DIR, Sweep, base_of
    from ..sweep.space import Space

    where = WorkerOptions(workers, trials_per_gpu, slurm, time, partition, tuple(sbatch_line or ()), ray)
    found, base = Space.read(space), base_of(spec, overrides or [])
    name = name or str(base["name"])
    check_folder_name("--name", name)
    draft, points = Sweep(SWEEPS_DIR / name, "sweep", base, found, threads=threads), found.points()
    specs = [draft.spec(point) for point in points]
    ranks, on_gpus = max(one.ranks for one in specs), specs[0].cluster.device != "cpu"
    where.check(ranks, threads, on_gpus)
    sweep = Sweep.create(draft.path, base, found, threads=threads)
    queued = queue(sweep, points, retry_failed)
    if slurm and queued:
        submit(sweep, where.array(sweep, queued, ranks, on_gpus), json)
        return
    if queued:
        watch(where.pool(sweep, queued, ranks, on_gpus), json)
    print_result(sweep, json)


def queue(sweep: Sweep, points: Sequence[Point], retry_failed: bool) -> int:
    """A trial for every point that has none; returns how many are to be run."""
    for number, point in enumerate(points):
        sweep.propose(point, number=number)
    if retry_failed:
        for trial in sweep.trials():
            if trial.state == "failed":
                sweep.run_until(trial.number, trial.until)
    return sum(not trial.settled for trial in sweep.trials())


def submit(sweep: Sweep, ask: Array, json: bool) -> None:
    from ..sweep.slurm import submit_array

    script, job = submit_array(sweep, ask)
    if json:
        print_json({"sweep": str(sweep.path), "job": job, "script": str(script), "workers": ask.workers})
    else:
        typer.echo(f"job {job}: {ask.workers} workers of {sweep.path}; see how it goes: lmworks runs show {sweep.path}")


def watch(workers: Workers, quiet: bool) -> None:
    """Until every trial is settled. Ctrl-C and SIGTERM stop trials with a checkpoint."""
    from ..sweep.progress import Progress
    from .sweep_display import Display, stopped_by_signals

    with (
        stopped_by_signals("the same command goes on with the trials that are left"),
        workers,
        Display(Progress(workers.sweep, workers.count, workers.resources), quiet) as display,
    ):
        workers.wait_for(lambda trials: all(trial.settled for trial in trials), display.update)


def print_result(sweep: Sweep, json: bool) -> None:
    """All trials and the best; exit code 1 where every trial failed."""
    from ..sweep.progress import Progress, best
    from .sweep_display import print_trials

    rows = Progress(sweep, 1).update(sweep.trials())
    if json:
        found = best(rows)
        trials = [row.to_dict() for row in rows]
        print_json({"sweep": str(sweep.path), "best": found and found.to_dict(), "trials": trials})
    else:
        print_trials(f"Trials of {sweep.path}", rows)
    if all(row.state == "failed" for row in rows):
        raise typer.Exit(1)


def check_folder_name(option: str, name: str) -> None:
    if why := unsafe_name(name):
        raise SpecError(f"{option} {name!r} cannot name a folder: {why}")


@app.command()
def worker(
    sweep: SweepDir,
    trials_per_gpu: TrialsPerGpu = 1,
    allocated: Annotated[bool, typer.Option("--allocated", help="A scheduler gave its GPUs to it alone.")] = False,
) -> None:
    """Run queued trials of a sweep until none is left.

    `lmworks sweep` starts its own; start more of them wherever the folder is seen.

    \b
    Examples:
      lmworks sweep worker sweeps/lr
    """
    from ..sweep.folder import Sweep
    from ..sweep.slots import own_resources, visible_gpus
    from ..sweep.worker import Launch, Process, Worker, start_forked
    from . import main, trial_imports  # noqa: F401  # the latter: trials are forks of this process and find them loaded

    opened = Sweep.open(locate(sweep))
    on_cpu = opened.spec({}).cluster.device == "cpu"
    machine = own_resources(() if on_cpu else visible_gpus(), trials_per_gpu, allocated)

    def start(launch: Launch) -> Process:
        return start_forked(launch, main.main, until_this_process_ends())

    raise typer.Exit(Worker(opened, machine, start).run())


def locate(sweep: Path) -> Path:
    """A sweep by its folder, or by its name below sweeps/."""
    from ..sweep.folder import SWEEPS_DIR

    for path in (sweep, SWEEPS_DIR / sweep):
        if (path / "sweep.json").is_file():
            return path
    raise SpecError(f"{sweep} is not a sweep: neither it nor {SWEEPS_DIR / sweep} has a sweep.json")
