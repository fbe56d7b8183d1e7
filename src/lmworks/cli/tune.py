"""`lmworks tune`: search a space for the lowest loss, with samplers and stoppers; what the search has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.errors import SpecError, did_you_mean
from .groups import DefaultCommandGroup
from .options import Overrides, Spec
from .output import Json, print_json, print_table
from .sweep import SpaceFile, SweepDir, check_folder_name, locate
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
    from ..sweep.progress import Progress, Row
    from ..tune.driver import Driver
    from ..tune.outcome import Outcome
    from ..tune.population_driver import PopulationDriver
    from ..tune.stoppers import Stopper

    AnyDriver = Driver | PopulationDriver

Plots = Annotated[Path | None, typer.Option("--plots", metavar="FOLDER", help="Draw what was found into this folder.")]


class SpecOrCommand(DefaultCommandGroup):
    """`lmworks tune SPEC …` is `lmworks tune run SPEC …`."""

    default_command = "run"


app = typer.Typer(
    cls=SpecOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Search a space for the lowest loss: samplers, stoppers, PBT.",
)


@app.command()
def run(
    spec: Spec,
    space: SpaceFile,
    overrides: Overrides = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="grid, random, sobol, tpe, gp, cmaes (Optuna's samplers); pbt, pb2.")
    ] = "tpe",
    stopper: Annotated[
        str, typer.Option("--stopper", show_default=False, help="none, median, asha (default) or hyperband.")
    ] = "",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials to start.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampler.")] = 0,
    eta: Annotated[int, typer.Option("--eta", help="One trial in so many goes on after a rung.")] = 3,
    min_steps: Annotated[
        int,
        typer.Option(
            "--min-steps", min=0, show_default=False, help="First rung (by default steps / eta³, after the warm-up)."
        ),
    ] = 0,
    interval: Annotated[
        int,
        typer.Option("--interval", min=0, show_default=False, help="pbt, pb2: steps between exchanges (steps / 8)."),
    ] = 0,
    stop_on: Annotated[
        list[str] | None,
        typer.Option("--stop-on", show_default=False, help="divergence (default), slope, predicted or none."),
    ] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option("--max-memory-gb", min=0, help="Refuse points whose rank would need more.")
    ] = None,
    max_dollars: Annotated[
        float | None, typer.Option("--max-dollars", min=0, help="Refuse points whose whole run would cost more.")
    ] = None,
    storage: Annotated[
        str, typer.Option("--storage", metavar="URL", help="Optuna's storage (by default a journal in the sweep).")
    ] = "",
    workers: WorkerCount = None,
    name: Annotated[str, typer.Option("--name", help="Kept in sweeps/NAME (by default the spec's, with -tune).")] = "",
    threads: Threads = 1,
    trials_per_gpu: TrialsPerGpu = 1,
    slurm: Slurm = False,
    time: SlurmTime = "",
    partition: SlurmPartition = "",
    sbatch_line: SbatchLines = None,
    ray: Ray = False,
    plots: Plots = None,
    json: Json = False,
) -> None:
    """Search a space for the lowest held-out loss.

    Trials are runs in sweeps/NAME. A trial that pauses at a rung keeps a checkpoint and goes on from it bit by bit if
    it is promoted. The same command goes on with a search that was stopped; more --trials extend it.

    \b
    Examples:
      lmworks tune configs/tiny.toml --space space.toml --trials 12
      lmworks tune configs/tiny.toml --space space.toml --algorithm gp --stopper none --trials 8 --json
      lmworks tune llama3-1b --space space.toml cluster.gpu=h100 data.path=data/code --max-dollars 40
    """
    from ..sweep.folder import SWEEPS_DIR, Sweep, base_of
    from ..sweep.space import Space
    from ..tune.constraints import Constraints
    from ..tune.driver import Driver
    from ..tune.importances import importances
    from ..tune.outcome import outcome_of
    from ..tune.population_driver import PopulationDriver
    from ..tune.stoppers import STOPPERS, stopper_of
    from ..tune.storage import shown as shown_storage
    from ..tune.storage import storage_errors, storage_of
    from ..tune.suggest import POPULATION, Suggestions, check_algorithm

    where = WorkerOptions(workers, trials_per_gpu, slurm, time, partition, tuple(sbatch_line or ()), ray)
    check_algorithm(algorithm)
    population = algorithm in POPULATION
    if population and stopper:
        raise SpecError(f"--stopper {stopper}: {algorithm} ends members by itself; leave it out")
    if population and storage:
        raise SpecError(
            f"--storage {shown_storage(storage)}: {algorithm} keeps all in the sweep's folder; leave it out"
        )
    if interval and not population:
        raise SpecError(
            f"--interval {interval} is of pbt and pb2; --stopper and --min-steps say where {algorithm} looks"
        )
    stopper = stopper or ("none" if population else "asha")
    if stopper not in STOPPERS:
        raise SpecError(f"unknown --stopper '{stopper}'{did_you_mean(stopper, STOPPERS)}")
    rules = stop_rules(stop_on)
    found = Space.read(space)
    if "optim.steps" in found.keys:
        raise SpecError(f"{space}: optim.steps: trials are compared after equal steps; sweep it with `lmworks sweep`")
    base = base_of(spec, overrides or [])
    kept = name or f"{base['name']}-tune"
    check_folder_name("--name", kept)
    settings = {"algorithm": algorithm, "stopper": stopper, "eta": eta, "min_steps": min_steps, "stop_on": rules}
    settings |= {"members": trials, "interval": interval} if population else {}
    settings |= {"storage": shown_storage(storage)} if storage else {}
    draft = Sweep(SWEEPS_DIR / kept, "tune", base, found, seed, threads, settings)
    steps = draft.spec({}).optim.steps
    most = min(trials, len(found.points())) if algorithm == "grid" else trials
    judge = stopper_of(stopper, most, min_steps or first_rung(steps, draft.spec({}).optim.warmup, eta), steps, eta)
    storage_url = storage or str(draft.path / "optuna.journal")
    if storage:
        storage_of(storage)
    limits = Constraints(max_memory_gb * 1e9 if max_memory_gb else None, max_dollars)
    limits.violation(draft.spec({}))  # whether they can be answered
    where.check(draft.spec({}).ranks, threads, draft.spec({}).cluster.device != "cpu")
    if population:
        PopulationDriver(draft, algorithm, trials, interval or max(1, steps // 8), steps).check()
    sweep = Sweep.create(draft.path, base, found, "tune", seed, threads, settings)

    def make_driver() -> AnyDriver:
        """By the one process that drives: what the last one left is read here."""
        if population:
            return PopulationDriver(sweep, algorithm, trials, interval or max(1, steps // 8), steps)
        state, owner = sweep.path / "sampler.pickle", sweep.identity if storage else ""
        suggestions = Suggestions(kept, found, algorithm, seed, storage_url, state, owner)
        return Driver(sweep, suggestions, judge, trials, rules, limits, grid=algorithm == "grid")

    if not json:
        print_rungs(judge, most)
    planned = sum(bracket.steps for bracket in judge.table()) or most * steps
    with storage_errors(storage_url):
        driver = run_driver(sweep, make_driver, most, planned, where, json)
        refused = driver.suggestions.refused() if isinstance(driver, Driver) else []
    result = outcome_of(draft)
    if json:
        extra = {"refused": [{"overrides": point, "why": why} for point, why in refused]}
        print_json({**result.to_dict(), **extra, "importances": importances(result)})
    else:
        print_outcome(result)
    draw(result, plots)


@app.command()
def show(sweep: SweepDir, plots: Plots = None, json: Json = False) -> None:
    """Show what a search has found so far.

    \b
    Examples:
      lmworks tune show tiny-tune
      lmworks tune show tiny-tune --plots plots --json
    """
    from ..sweep.folder import Sweep
    from ..tune.outcome import outcome_of

    result = outcome_of(Sweep.open(locate(sweep)))
    if json:
        print_json(result.to_dict())
    else:
        print_outcome(result)
    draw(result, plots)


@app.command()
def seeds(
    sweep: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP]", help="A sweep whose trials differ in their seed.")
    ] = None,
    std: Annotated[
        float | None, typer.Option("--std", min=0, help="The spread between seeds in percent, instead of a sweep.")
    ] = None,
    difference: Annotated[
        list[float] | None, typer.Option("--difference", help="In percent of the loss (5, 2, 1, 0.5 and 0.2).")
    ] = None,
    json: Json = False,
) -> None:
    """Say how many seeds a difference of the loss needs.

    Each of two specs, for a two-sided t-test at 5 % that finds the difference four times in five.

    \b
    Examples:
      lmworks tune seeds seeds-sweep
      lmworks tune seeds --std 0.4 --difference 1
    """
    from ..sweep.folder import Sweep
    from ..tune.outcome import outcome_of
    from ..tune.seeds import DIFFERENCES, SeedNoise, seed_noise, seed_table

    if (sweep is None) == (std is None or std == 0):
        raise SpecError("give a sweep of seeds, or the spread between them as --std PERCENT")
    if sweep is not None:
        found = outcome_of(Sweep.open(locate(sweep)))
        ends = [(trial.overrides, loss) for trial in found.trials if (loss := found.loss(trial.number)) is not None]
        noise = seed_noise(ends)
    else:
        noise = SeedNoise((std or 0) / 100, (std or 0) / 100, (std or 0) / 100, 0, 0, 0.0)
    table = seed_table(noise, [each / 100 for each in difference] if difference else DIFFERENCES)
    if json:
        print_json({"noise": noise.to_dict(), "seeds": table})
        return
    if noise.runs:
        typer.echo(
            f"{noise.runs} runs in {noise.groups} group{'s' * (noise.groups > 1)}: a standard deviation of "
            f"{noise.std:.2%} of the loss between seeds ({noise.low:.2%} to {noise.high:.2%} with 95 %)"
        )
    rows = [
        [
            f"{row['difference']:.1%}",
            said(row["seeds"]),
            *([said(row["seeds_low"]), said(row["seeds_high"])] * bool(noise.runs)),
        ]
        for row in table
    ]
    columns = ["difference", "seeds of each", *(["at least", "at most"] * bool(noise.runs))]
    print_table("Seeds that a difference needs", columns, rows)


def run_driver(
    sweep: Sweep, make: Callable[[], AnyDriver], trials: int, planned: int, where: WorkerOptions, quiet: bool
) -> AnyDriver:
    """Until nothing is left to do. Ctrl-C and SIGTERM stop trials with a checkpoint."""
    from .sweep_display import Display, print_waiting, stopped_by_signals

    spec = sweep.spec({})
    workers = where.pool(sweep, trials, spec.ranks, spec.cluster.device != "cpu")
    with (
        stopped_by_signals("the same command goes on with the search"),
        sweep.driving(print_waiting),
    ):
        driver = make()
        with workers, Display(search_progress(planned, workers), quiet) as display:
            driver.run(workers, display.update)
    return driver


def search_progress(planned: int, workers: Workers) -> Progress:
    """Rows of a sweep; the time left by the steps that are planned in all, at the pace so far."""
    from ..sweep.progress import Progress

    began: list[tuple[float, int]] = []

    class SearchProgress(Progress):
        def eta_s(self, rows: Sequence[Row]) -> float | None:
            done, now = sum(row.step - first_step(row) for row in rows), monotonic()
            if not began:
                began.append((now, done))
            start, before = began[0]
            return (now - start) / (done - before) * max(0, planned - done) if done > before else None

    return SearchProgress(workers.sweep, workers.count, workers.resources)


def first_step(row: Row) -> int:
    return row.trial.parent["step"] if row.trial.parent else 0


# --- options ---------------------------------------------------------------------------------------------


def stop_rules(wanted: list[str] | None) -> list[str]:
    from ..tune.early_stop import RULES

    chosen = [rule for rule in wanted or ["divergence"] if rule != "none"]
    for rule in chosen:
        if rule not in RULES:
            raise SpecError(f"unknown --stop-on '{rule}'{did_you_mean(rule, (*RULES, 'none'))}")
    return chosen


def first_rung(steps: int, warmup: int, eta: int) -> int:
    """steps / η³, but after the warm-up, in which the highest learning rates look best."""
    return max(1, min(max(steps // max(2, eta) ** 3, 2 * warmup), steps))


# --- what is printed -------------------------------------------------------------------------------------


def print_rungs(stopper: Stopper, trials: int) -> None:
    """n, n/η, n/η² … trials with r, r·η, r·η² … steps, and what that costs beside whole runs."""
    brackets = stopper.table()
    if not brackets:
        return
    rows = []
    for number, bracket in enumerate(brackets):
        for rung in bracket.rungs:
            rows.append([*([number] * (len(brackets) > 1)), f"{rung.step:,}", rung.trials])
    print_table("Rungs", [*(["bracket"] * (len(brackets) > 1)), "steps", "trials"], rows)
    steps, whole = sum(bracket.steps for bracket in brackets), trials * stopper.rungs[-1]
    typer.echo(
        f"about {steps:,} steps in all; {trials} whole runs would be {whole:,} ({whole / steps:.1f} times as many)"
    )


def print_outcome(found: Outcome) -> None:
    keys = found.sweep.space.keys
    rows = [
        [
            trial.number,
            *(shown(trial.overrides.get(key)) for key in keys),
            trial.state,
            f"{trial.step:,}",
            "–" if (loss := found.loss(trial.number)) is None else f"{loss:.4f}",
            trial.notes.get("stopped") or trial.error or "",
        ]
        for trial in sorted(found.trials, key=lambda trial: (-trial.step, found.loss(trial.number) or float("inf")))
    ]
    columns = ["trial", *(key.rpartition(".")[2] for key in keys), "state", "steps", "loss", "stopped"]
    print_table(f"Trials of {found.sweep.path}", columns, rows, drop=["stopped"])
    if found.best:
        changes = " ".join(f"{key}={shown(value)}" for key, value in found.best.overrides.items())
        typer.echo(f"best: trial {found.best.number}, loss {found.loss(found.best.number):.4f}: {changes}")
    for warning in found.warnings():
        typer.echo(f"note: {warning}")


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def said(count: int | None) -> str:
    return "more than 10,000" if count is None else f"{count:,}"


def draw(found: Outcome, folder: Path | None) -> None:
    if folder is None:
        return
    from ..tune.plots import draw_outcome

    for path in draw_outcome(found, folder):
        typer.echo(f"drawn: {path}", err=True)
