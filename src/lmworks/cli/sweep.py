"""`lmworks sweep`: run every point of a space, by workers on this machine or elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..spec import SpecError
from .groups import DefaultCommandGroup
from .output import Json, Overrides, Spec, print_json
from .ranks import PARENT_PID_VARIABLE

SpaceFile = Annotated[
    Path, typer.Option("--space", metavar="SPACE.toml", help="Which keys take which values (docs/sweeps.md).")
]
SweepDir = Annotated[Path, typer.Argument(metavar="SWEEP", help="The folder of a sweep, or its name below sweeps/.")]
TrialsPerGpu = Annotated[int, typer.Option("--trials-per-gpu", min=1, help="Trials that share a GPU.")]


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
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Trials at a time (default: all fit).")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="The sweep is kept in sweeps/NAME (by default the spec's).")] = "",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads of each rank of a trial.")] = 1,
    trials_per_gpu: TrialsPerGpu = 1,
    json: Json = False,
) -> None:
    """Run every point of a space, each as a run of its own.

    The same command goes on with a sweep that was stopped.

    \b
    Examples:
      lmworks sweep configs/tiny.toml --space space.toml
      lmworks sweep configs/tiny.toml --space space.toml optim.steps=50 --workers 2 --name lr
    """
    from ..sweep.folder import SWEEPS_DIR, Sweep, base_of
    from ..sweep.pool import Workers
    from ..sweep.slots import this_machine, visible_gpus
    from ..sweep.space import Space

    points = (found := Space.read(space)).points()
    base = base_of(spec, overrides or [])
    sweep = Sweep.create(SWEEPS_DIR / (name or str(base["name"])), base, found, threads=threads)
    specs = [sweep.spec(point) for point in points]
    ranks = max(one.ranks for one in specs)
    machine = this_machine(visible_gpus() if specs[0].cluster.device != "cpu" else (), trials_per_gpu)
    count = workers or min(len(points), machine.workers(ranks, threads))
    machine.check(count, ranks, threads)
    for number, point in enumerate(points):
        sweep.propose(point, number=number)
    with Workers(sweep, count, ["--trials-per-gpu", str(trials_per_gpu)]) as running:
        running.wait_for(lambda trials: all(trial.settled for trial in trials))
    if json:
        print_json({"sweep": str(sweep.path), "trials": [vars(trial) for trial in sweep.trials()]})


@app.command()
def worker(sweep: SweepDir, trials_per_gpu: TrialsPerGpu = 1) -> None:
    """Run queued trials of a sweep until none is left.

    `lmworks sweep` starts its own; start more of them wherever the folder is seen.

    \b
    Examples:
      lmworks sweep worker sweeps/lr
    """
    from ..sweep.folder import Sweep
    from ..sweep.slots import this_machine, visible_gpus
    from ..sweep.worker import Launch, Process, Worker, start_forked
    from . import main, trial_imports  # noqa: F401  # the latter: trials are forks of this process and find them loaded

    opened = Sweep.open(locate(sweep))
    on_cpu = opened.spec({}).cluster.device == "cpu"
    machine = this_machine(() if on_cpu else visible_gpus(), trials_per_gpu)

    def start(launch: Launch) -> Process:
        return start_forked(launch, main.main, {PARENT_PID_VARIABLE: str(os.getpid())})

    raise typer.Exit(Worker(opened, machine, start).run())


def locate(sweep: Path) -> Path:
    """A sweep by its folder, or by its name below sweeps/."""
    from ..sweep.folder import SWEEPS_DIR

    for path in (sweep, SWEEPS_DIR / sweep):
        if (path / "sweep.json").is_file():
            return path
    raise SpecError(f"{sweep} is not a sweep: neither it nor {SWEEPS_DIR / sweep} has a sweep.json")
