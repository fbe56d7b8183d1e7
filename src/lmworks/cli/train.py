"""`lmworks train` and `lmworks resume`."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Json, Overrides, Spec, print_json
from .ranks import needs_ranks, start_ranks

if TYPE_CHECKING:
    from ..train import Trainer

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def train(
    spec: Spec,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Where the run is kept (by default runs/NAME).")
    ] = None,
    json: Json = False,
) -> None:
    """Train a model as the spec says, and leave a run folder behind.

    \b
    Examples:
      lmworks train configs/tiny.toml
      lmworks train configs/small.toml optim.lr=3e-4 model.layers=8 --run-dir runs/wide
      lmworks train gpt2-small data.path=data/code precision.dtype=bf16
      lmworks train configs/tiny.toml parallel.dp=2 parallel.strategy=fsdp2
      torchrun --nproc-per-node 4 -m lmworks.train configs/tiny.toml parallel.dp=2 parallel.tp=2
    """
    from ..record import RunFolder
    from ..spec import load_run

    loaded = load_run(spec, overrides or ())
    target = run_dir or free_folder(loaded.name)
    if needs_ranks(loaded):
        RunFolder(target).refuse_taken()
        options = ["--run-dir", str(target), *(["--json"] if json else [])]
        start_ranks(loaded, ["train", spec, *(overrides or ()), *options])
        return
    from ..observe.probe import cached_machine
    from ..parallel.world import is_lead, leaving
    from ..train import Trainer

    machine = cached_machine(loaded.cluster) if is_lead() else None  # rank 0 writes what is predicted
    with leaving():
        run_to_the_end(Trainer(loaded, target, machine=machine, quiet=json), json)


def resume(run: RunDir, json: Json = False) -> None:
    """Go on with a run from its newest intact checkpoint.

    \b
    Examples:
      lmworks resume runs/tiny
    """
    from ..record import RunFolder

    spec = RunFolder.open(run).spec()
    if needs_ranks(spec):
        start_ranks(spec, ["resume", str(run), *(["--json"] if json else [])])
        return
    from ..parallel.world import leaving
    from ..train import Trainer

    with leaving():
        run_to_the_end(Trainer.resume(run, quiet=json), json)


def run_to_the_end(trainer: Trainer, json: bool) -> None:
    """Run, write the report whatever came of it, and say where everything is."""
    from ..observe.report import write_report
    from ..spec import LMWorksError, SpecError

    folder = trainer.folder
    try:
        result = trainer.run()
    except SpecError:  # nothing was started
        raise
    except Exception:  # a second Ctrl-C is none: it does not wait for a report
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(LMWorksError):  # a full disk has no room for the report either
            if trainer.lead and folder.metrics_path.exists():
                write_report(folder)
        signal.signal(signal.SIGINT, before)
        raise
    if not trainer.lead:
        return
    write_report(folder)
    if json:
        summary = {"run": str(folder.path), "step": trainer.step, "val_loss": result.loss, "val_tokens": result.tokens}
        print_json({**summary, "report": str(folder.report_path)})
    else:
        typer.echo(
            f"done: {trainer.step} steps, loss {result.loss:.4f} nats/token over {result.tokens:,} held-out tokens"
        )
        typer.echo(f"run: {folder.path}   report: {folder.report_path}")


def free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, -3 … where that is taken."""
    first = Path("runs") / name
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path
