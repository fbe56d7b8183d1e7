"""From a plan to a run: the data that a spec names, and the command that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..data.index import Index
    from ..spec import Cluster, DataSpec, RunSpec


def refuse_vocabulary(spec: RunSpec) -> None:
    """As training does, for data that are here; others are looked at where the run starts."""
    from ..data.cache import refuse_vocabulary

    for index in prepared(spec.data).values():
        if index:
            refuse_vocabulary(spec, index.vocab_size)


def prepared(data: DataSpec) -> dict[str, Index | None]:
    """The index of each folder that a spec names; None where it is not here, or is made on first use."""
    from ..data.index import read_index

    return {path: read_index(path) if path and Path(path).exists() else None for path in data.sources}


def print_written(spec: RunSpec, out: Path, place: int) -> None:
    """What the written spec trains on, and the command that starts it: here, or where the GPUs are."""
    from ..record.figures import short

    if place:
        typer.echo(f"{out} is row {place + 1}: those above do not fit by the exact sheet of lmworks plan memory")
    steps, each = spec.optim.steps, spec.tokens_per_step
    typer.echo(
        f"wrote {out}: {steps:,} steps of {each:,} tokens, {short(steps * each)} in all; {spec.optim.warmup:,} of them "
        f"to warm up to lr {spec.optim.lr:g}; a checkpoint every {spec.checkpoint.every:,} steps"
    )
    change = "" if spec.data.named else " data.path=FOLDER"
    for path, index in prepared(spec.data).items():
        if index:
            times = steps * each / max(1, index.tokens("train"))
            typer.echo(f"{path} has {short(index.tokens('train'))} tokens to train on: {times:,.1f} epochs")
        elif path and not path.startswith("stdlib"):
            typer.echo(f"{path} is not on this machine: neither its vocabulary nor its length was checked")
    if not spec.data.named:
        typer.echo('it names no data (data.path = ""): search again with --data FOLDER, or name one where it starts:')
    if is_here(spec.cluster):
        typer.echo(f"train it here with: lmworks train {out}{change}")
    else:
        script = out.with_suffix(".sbatch")
        typer.echo(f"{spec.cluster.gpus} × {spec.cluster.gpu} are not here; write the job that starts it there with:")
        typer.echo(f"lmworks launch slurm {out}{change} --out {script}   (or launch kubernetes, launch ray)")


def is_here(cluster: Cluster) -> bool:
    """Whether this machine has all accelerators of the cluster."""
    if cluster.nodes > 1:
        return False
    import torch

    from ..spec import recognise

    if not torch.cuda.is_available() or torch.cuda.device_count() < cluster.gpus:
        return False
    return recognise(torch.cuda.get_device_name(), cluster.catalogue) == cluster.accelerator
