"""`lmworks train`, `lmworks resume` and `lmworks eval`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..data.progress import activity
from ..record import RunFolder, read_metrics
from ..spec import LMWorksError, RunSpec, SpecError, load_run
from ..spec.load import is_hf_folder
from .generate import Step
from .loading import loading
from .options import Dial, Force, OnDevice, Overrides, Spec, device_options, on_device, with_dial
from .output import Json, print_json, print_table
from .ranks import needs_ranks, supervise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..train import Trainer
    from ..train.evaluate import PositionLoss

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
MaxRestarts = Annotated[
    int | None,
    typer.Option("--max-restarts", min=0, help="Restarts of failed ranks (by default fault.max_restarts)."),
]

Until = Annotated[
    int | None,
    typer.Option("--until", min=1, metavar="STEP", help="Pause after this step, with a checkpoint and an evaluation."),
]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html and its plots at the end.")]


def train(
    spec: Spec,
    overrides: Overrides = None,
    dial: Dial = "",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run is kept (by default runs/NAME).")
    ] = None,
    max_restarts: MaxRestarts = None,
    until: Until = None,
    device: OnDevice = "",
    force: Force = False,
    report: Report = True,
    json: Json = False,
) -> None:
    """Train a model from a spec, and write a run folder.

    \b
    Examples:
      lmworks train configs/tiny.toml
      lmworks train configs/small.toml optim.lr=3e-4 model.layers=8 --run-dir runs/wide
      lmworks train gpt2-small data.path=data/code precision.dtype=bf16
      lmworks train configs/tiny.toml parallel.dp=2 parallel.strategy=fsdp2
      lmworks train configs/tiny.toml parallel.dp=2 --max-restarts 3
      lmworks train configs/small.toml --dial depth=12
      lmworks train configs/tiny.toml --until 50
      lmworks train configs/tiny.toml cluster.gpu=h100 --device cpu
      torchrun --nproc-per-node 4 -m lmworks.train configs/tiny.toml parallel.dp=2 parallel.tp=2
    """
    with contextlib.suppress(OSError):  # of a name that `load_run` refuses
        if is_hf_folder(Path(spec)):
            raise SpecError(
                f"{spec} is a Hugging Face model, not a spec: `lmworks finetune {spec} --data FILE` trains it on "
                f"examples; to pretrain it further, give checkpoint.init={spec} to a spec"
            )
    changes = with_dial(spec, overrides, dial)
    loaded = load_run(spec, [*changes, *on_device(device)])
    loaded.data.check_path_given()
    start_run(loaded, ["train", spec, *changes], run_dir, max_restarts, device, force, json, until, report)


def start_run(
    loaded: RunSpec,
    command: list[str],  # how ranks are started with the same spec, without options
    run_dir: Path | None,
    max_restarts: int | None,
    device: str,
    force: bool,
    json: bool,
    until: int | None = None,
    report: bool = True,
) -> None:
    """Train in this process, or start the ranks of the layout and supervise them."""
    if loaded.log.suites:
        from ..evals.during_training import check_suites

        check_suites(loaded)
    target = run_dir or default_run_folder(loaded)
    options = [*device_options(device, force), *run_options(until, report, json)]
    if needs_supervisor(loaded, max_restarts):
        RunFolder(target).check_unused()
        first, again = [*command, "--run-dir", str(target), *options], ["resume", str(target), *options]
        supervise(loaded, RunFolder(target), first, again, restart_limit(loaded, max_restarts), force=force)
        return
    from ..align.post_trainer import trainer_class
    from ..bench.calibrate import cached_machine
    from ..parallel.world import distributed_shutdown, is_rank_zero
    from ..train.restart import is_restart

    # Every rank checks before the rendezvous, and the folder is created after it: all see the same.
    if is_restart(RunFolder(target)):
        resume(target, until=until, device=device, force=force, report=report, json=json)
        return
    machine = cached_machine(loaded.cluster) if is_rank_zero() else None  # rank 0 writes what is predicted
    with distributed_shutdown():
        trainer = trainer_class(loaded)(loaded, target, machine=machine, quiet=json, force=force)
        run_trainer(trainer, json, until, report)


def resume(
    run: RunDir,
    max_restarts: MaxRestarts = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Resume with this many ranks, fewer than the layout has (fault.elastic)."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Resume from the checkpoint of this step; later ones are set aside."),
    ] = None,
    until: Until = None,
    device: OnDevice = "",
    force: Force = False,
    report: Report = True,
    json: Json = False,
) -> None:
    """Continue a run from its newest intact checkpoint, or another.

    \b
    Examples:
      lmworks resume runs/tiny
      lmworks resume runs/tiny --max-restarts 3
      lmworks resume runs/wide --ranks 2
      lmworks resume runs/tiny --step 100
      lmworks resume runs/tiny --until 150
    """
    folder = RunFolder.open(run)
    spec = load_run(run, on_device(device))
    if needs_supervisor(spec, max_restarts) or (ranks is not None and "RANK" not in os.environ):
        chosen = ["--step", str(step)] if step is not None else []
        options = [*chosen, *device_options(device, force), *run_options(until, report, json)]
        again = ["resume", str(run), *options]
        supervise(spec, folder, again, again, restart_limit(spec, max_restarts), ranks, force)
        return
    from ..align.post_trainer import trainer_class
    from ..parallel.world import distributed_shutdown

    with distributed_shutdown():
        trainer = trainer_class(spec).resume(run, step=step, quiet=json, device=device, force=force)
        run_trainer(trainer, json, until, report)


def run_options(until: int | None, report: bool, json: bool) -> list[str]:
    """For the ranks that are started."""
    paused = ["--until", str(until)] if until is not None else []
    return [*paused, *([] if report else ["--no-report"]), *(["--json"] if json else [])]


def needs_supervisor(spec: RunSpec, max_restarts: int | None) -> bool:
    """Whether this process starts the ranks: there are several, or restarts are enabled."""
    return needs_ranks(spec) or (restart_limit(spec, max_restarts) > 0 and "RANK" not in os.environ)


def restart_limit(spec: RunSpec, max_restarts: int | None) -> int:
    return spec.fault.max_restarts if max_restarts is None else max_restarts


def run_trainer(trainer: Trainer, json: bool, until: int | None, report: bool) -> None:
    """Runs the trainer, writes the report even after a failure, and prints the paths."""
    from ..report.predicted_vs_measured import AFTER, compare
    from ..report.run_report import write_report

    folder, trainer.until = trainer.folder, until
    if trainer.spec.log.suites:
        from ..evals.during_training import attach_suites

        attach_suites(trainer)
    try:
        result = trainer.run()
    except SpecError:  # nothing was started
        raise
    except Exception:  # a second Ctrl-C is none: it does not wait for a report
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(LMWorksError, MemoryError):  # a full disk, or memory, has no room for it either
            if report and trainer.is_rank_zero and folder.metrics_path.exists():
                write_report(folder)
        signal.signal(signal.SIGINT, before)
        raise
    if not trainer.is_rank_zero:
        return
    if report:
        write_report(folder)
    rows = compare(folder, read_metrics(folder.metrics_path))
    if json:
        summary = {"run": str(folder.path), "step": trainer.step, "val_loss": result.loss, "val_tokens": result.tokens}
        summary |= {"predicted": [row.to_dict() for row in rows]}
        print_json({**summary, "report": str(folder.report_path)} if report else summary)
        return
    done = trainer.is_finished
    typer.echo(f"{'done' if done else 'paused'}: {trainer.step} steps, {result}")
    for row in rows:
        if row.after is not None and row.name in ("step_s", "run_s"):
            first = "" if row.predicted is None else f"{row.show(row.predicted)} predicted before, "
            typer.echo(f"{row.label}: {first}{row.show(row.after)} {AFTER}, {row.show(row.measured)} measured")
    typer.echo(f"run: {folder.path}" + (f"   report: {folder.report_path}" if report else ""))
    if not done:
        typer.echo(f"continue with: lmworks resume {folder.path}")


def default_run_folder(spec: RunSpec) -> Path:
    """The default folder of a run. Refused where torchrun may restart ranks: they would not find it again."""
    again = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if "TORCHELASTIC_RUN_ID" in os.environ and (again or spec.fault.elastic):
        raise SpecError("torchrun may restart these ranks: name their run folder with --run-dir")
    return unused_run_folder(spec.name)


def unused_run_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, -3 … where that is taken."""
    first = Path("runs") / name
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path


# --- evaluate --------------------------------------------------------------------------------------------


def evaluate(
    run: RunDir,
    step: Step = None,
    batches: Annotated[int, typer.Option("--batches", min=0, help="Micro-batches to use (0: all held-out data).")] = 0,
    by_position: Annotated[
        bool, typer.Option("--by-position", help="Also by the position of a token in its window.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure the loss of a run on its held-out data.

    \b
    Examples:
      lmworks eval runs/tiny
      lmworks eval runs/tiny --step 100 --json
      lmworks eval runs/tiny --by-position
    """
    from ..train.evaluate import evaluate as measure
    from ..train.evaluate import held_out, loss_by_position
    from ..train.load_run import load_trained

    with activity() as doing:
        doing(loading(run, step), 0, 0)
        trained = load_trained(run, step)
        data = held_out(trained.spec)
        doing("measuring the loss on held-out data", 0, 0)
        result = measure(trained.model, data, trained.spec, batches)
        bands = loss_by_position(trained.model, data, trained.spec, batches) if by_position else []
    bits_per_byte = result.loss / math.log(2) / data.bytes_per_token
    summary = {
        "run": str(run),
        "step": trained.step,
        "loss": result.loss,
        "perplexity": math.exp(min(result.loss, 700)),
        "bits_per_byte": bits_per_byte,
        "tokens": result.tokens,
    }
    if by_position:
        summary["by_position"] = [vars(band) for band in bands]
    if json:
        print_json(summary)
    else:
        typer.echo(
            f"step {trained.step}: loss {result.loss:.4f} nats/token, perplexity {summary['perplexity']:.2f}, "
            f"{bits_per_byte:.3f} bits/byte over {result.tokens:,} held-out tokens"
        )
        if by_position:
            print_positions(bands)


def print_positions(bands: Sequence[PositionLoss]) -> None:
    rows = [[f"{band.first}–{band.last}", f"{band.loss:.4f}", f"{band.tokens:,}"] for band in bands]
    print_table("Loss by position", ["position", "loss", "tokens"], rows)
