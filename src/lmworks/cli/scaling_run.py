"""`lmworks scaling run`: the runs of a ladder, and a prediction of the largest before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import short
from .options import Overrides
from .output import Json, print_json, print_table
from .sweep import check_folder_name
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
    from collections.abc import Sequence

    from ..scaling.ladder import Ladder, LadderRun
    from ..scaling.ladder_driver import LadderDriver, Prediction
    from ..spec import RunSpec
    from ..sweep.folder import Sweep


def run(
    ladder: Annotated[
        Path, typer.Argument(metavar="LADDER.toml", help="Sizes, budgets and the spec (docs/scaling.md).")
    ],
    overrides: Overrides = None,
    workers: WorkerCount = None,
    name: Annotated[str, typer.Option("--name", help="Kept in sweeps/NAME (by default the ladder's file name).")] = "",
    threads: Threads = 1,
    trials_per_gpu: TrialsPerGpu = 1,
    slurm: Slurm = False,
    time: SlurmTime = "",
    partition: SlurmPartition = "",
    sbatch_line: SbatchLines = None,
    ray: Ray = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs, and start none.")] = False,
    json: Json = False,
) -> None:
    """Train the models of a scaling study.

    Shapes have the exact parameter and FLOP counts that the ladder asks for. The runs are trials in sweeps/NAME, where
    `lmworks scaling fit` reads them. The same command goes on with a ladder that was stopped. With a holdout, the law
    of the finished runs predicts the last one before it is started.

    \b
    Examples:
      lmworks scaling run ladder.toml --dry-run
      lmworks scaling run ladder.toml --workers 2
      lmworks scaling run ladder.toml data.path=data/code --trials-per-gpu 6 --json
    """
    from ..scaling.ladder import Ladder, plan
    from ..scaling.ladder_driver import LadderDriver, check_epochs, holdout_run, ladder_base
    from ..spec.load import find_config
    from ..sweep.folder import SWEEPS_DIR, Sweep, base_of
    from ..sweep.space import Space

    where = WorkerOptions(workers, trials_per_gpu, slurm, time, partition, tuple(sbatch_line or ()), ray)
    path = find_config(ladder, "ladder")
    asked = Ladder.read(path)
    base = base_of(ladder_base(path, asked), overrides or [])
    kept = name or ladder.stem
    check_folder_name("--name", kept)
    draft = Sweep(SWEEPS_DIR / kept, "scaling", {**base, "name": kept}, Space(()), threads=threads)
    spec = draft.spec({})
    runs = plan(asked, spec)
    tokens = train_tokens(spec)
    held = [holdout_run(asked, spec, asked.holdout.params)] if asked.holdout and asked.holdout.params else []
    check_epochs(asked, [*runs, *held], tokens, spec.data.path)
    if not json:
        print_plan(runs, tokens)
    if dry_run:
        if json:
            print_json({"runs": [row_of(one, tokens) for one in runs], "flops": total_flops(runs)})
        return
    where.check(spec.ranks, threads, spec.cluster.device != "cpu")
    settings = {"ladder": asked.to_dict()}
    sweep = Sweep.create(draft.path, draft.base, draft.space, "scaling", threads=threads, settings=settings)
    driver = LadderDriver(sweep, runs)
    prediction = train(driver, asked, spec, tokens, where, json)
    print_outcome(sweep, prediction, json)


def train(
    driver: LadderDriver, asked: Ladder, spec: RunSpec, tokens: int, where: WorkerOptions, quiet: bool
) -> Prediction | None:
    """Until all runs have ended. Ctrl-C and SIGTERM stop them with a checkpoint."""
    from ..sweep.progress import Progress
    from .sweep_display import Display, print_waiting, stopped_by_signals

    sweep = driver.sweep
    workers = where.pool(sweep, len(driver.runs), spec.ranks, spec.cluster.device != "cpu")
    with stopped_by_signals("the same command goes on with the ladder"), sweep.driving(print_waiting):
        driver.start()
        with workers, Display(Progress(sweep, workers.count, workers.resources), quiet) as display:
            workers.wait_for(driver.advance, display.update)
            prediction = driver.start_holdout(asked, spec, tokens) if asked.holdout else None
            workers.wait_for(driver.advance, display.update)
    return prediction


def train_tokens(spec: RunSpec) -> int:
    """Tokens of the training split; prepares the embedded corpus on first use."""
    from ..data import open_batches

    return open_batches(spec.data, spec.checkpoint.init, seed=spec.seed).windows * spec.data.seq


# --- what is printed -------------------------------------------------------------------------------------


def row_of(one: LadderRun, tokens: int) -> dict[str, Any]:
    keys = ("number", "parent", "n", "n_no_embed", "d", "flops", "budget", "seq", "steps", "batch", "lr", "overrides")
    return {key: getattr(one, key) for key in keys} | {"epochs": one.d / tokens}


def total_flops(runs: Sequence[LadderRun]) -> float:
    """Branches cost what comes after their fork."""
    return sum(one.flops * (1 - one.fork / one.steps) for one in runs)


def print_plan(runs: Sequence[LadderRun], tokens: int) -> None:
    rows = [
        [
            str(one.number),
            f"{one.overrides['model.layers']} × {one.overrides['model.hidden']}",
            short(one.n),
            short(one.n_no_embed),
            str(one.seq),
            short(one.d),
            f"{one.d / one.n:.1f}",
            f"{one.d / tokens:.2f}",
            f"{one.flops:.3g}",
            str(one.steps),
            short(one.batch),
            f"{one.lr:.3g}",
            f"run {one.parent}, step {one.fork}" if one.parent is not None else "-",
        ]
        for one in runs
    ]
    columns = ["run", "shape", "params", "no embed", "seq", "tokens", "a param", "epochs", "FLOPs", "steps", "batch"]
    print_table("Runs of the ladder", [*columns, "lr", "branches off"], rows)
    typer.echo(f"{len(runs)} runs, {total_flops(runs):.3g} FLOPs in all; {tokens:,} tokens of text")


def print_outcome(sweep: Sweep, prediction: Prediction | None, json: bool) -> None:
    from ..sweep.progress import Progress
    from .sweep_display import print_trials

    rows = Progress(sweep, 1).update(sweep.trials())
    measured = None
    if prediction is not None:
        trial = sweep.trial(prediction.number)
        measured = (trial.result or {}).get("val_loss") if trial.state == "finished" else None
    if json:
        held = prediction and {**vars(prediction), "measured": measured}
        print_json({"sweep": str(sweep.path), "runs": [row.to_dict() for row in rows], "holdout": held})
    else:
        print_trials(f"Runs of {sweep.path}", rows)
        if prediction is not None:
            typer.echo(prediction_text(prediction, measured))
        typer.echo(f"fit: lmworks scaling fit {sweep.path}")
    if all(row.state == "failed" for row in rows):
        raise typer.Exit(1)


def prediction_text(prediction: Prediction, measured: float | None) -> str:
    spread = "too few trunks for an interval"
    if prediction.low is not None:
        spread = f"{prediction.low:.5g} to {prediction.high:.5g} at {prediction.level:.0%}"
    found = "not finished" if measured is None else f"{measured:.4f} ({measured / prediction.loss - 1:+.2%})"
    size = f"{short(prediction.n)} parameters, {short(prediction.d)} tokens, {prediction.flops:.3g} FLOPs"
    return (
        f"holdout, run {prediction.number}: {size}: predicted loss {prediction.loss:.4f} ({spread}), measured {found}"
    )
