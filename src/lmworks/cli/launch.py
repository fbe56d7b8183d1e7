"""`lmworks launch`: write the job that starts a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..record.formatting import short
from ..spec import Cluster, DataSpec, RunSpec, load_run, recognise
from ..spec.errors import SpecError, did_you_mean
from ..spec.files import with_absolute_paths
from .groups import CommandGroup
from .options import Overrides, Spec
from .output import write_file

if TYPE_CHECKING:
    from ..data.index import Index
    from ..launch import Job

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write a job that starts a run on Slurm, Kubernetes or Ray.",
)

Nodes = Annotated[int | None, typer.Option(min=1, help="Machines (by default cluster.nodes, or what the ranks need).")]
PerNode = Annotated[int | None, typer.Option(min=1, help="Ranks on each (by default cluster.gpus_per_node).")]
RunDir = Annotated[str, typer.Option("--run-dir", help="Where the run is kept, seen by all nodes (runs/NAME).")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write (by default: print it).")]
Grace = Annotated[int, typer.Option(min=60, help="Seconds for a checkpoint before a run is stopped.")]


@app.command()
def slurm(
    spec: Spec,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: PerNode = None,
    time: Annotated[str, typer.Option(help="Time limit, e.g. 1-12:00:00.")] = "",
    partition: Annotated[str, typer.Option(help="Partition to run in.")] = "",
    account: Annotated[str, typer.Option(help="Account to charge.")] = "",
    qos: Annotated[str, typer.Option(help="Quality of service to run with.")] = "",
    container: Annotated[str, typer.Option(help="Image to run in, with the pyxis plugin.")] = "",
    cpus_per_node: Annotated[int, typer.Option(min=0, help="CPUs of a shared node (0: whole nodes).")] = 0,
    grace: Grace = 300,
    requeue: Annotated[bool, typer.Option(help="Queue again when the time is up.")] = True,
    module: Annotated[list[str] | None, typer.Option(help="Environment module to load; may be repeated.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable for every rank; may be repeated.")
    ] = None,
    sbatch_line: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="One more #SBATCH line, e.g. --constraint=ib; may be repeated."),
    ] = None,
    run_dir: RunDir = "",
    out: Out = None,
) -> None:
    """Write an sbatch script: one torchrun agent a node.

    Before the time limit the run saves a checkpoint and is queued again; it then resumes.

    \b
    Examples:
      lmworks launch slurm configs/tiny.toml parallel.dp=16 --nodes 2 --gpus-per-node 8 --time 4:00:00 -o tiny.sbatch
      lmworks launch slurm configs/tiny.toml parallel.dp=2 cluster.device=cpu --nodes 2 --cpus-per-node 4
      lmworks launch slurm configs/tiny.toml --qos high --module cuda/12.8 --env NCCL_DEBUG=INFO --sbatch-line=--mem=0
    """
    from ..launch import Allocation, slurm_script

    job = make_job(spec, overrides, nodes, gpus_per_node, run_dir)
    allocation = Allocation(
        time, partition, account, container, cpus_per_node, grace, requeue,
        qos, tuple(sbatch_line or ()), tuple(env or ()), tuple(module or ()),
    )  # fmt: skip
    write_or_print(slurm_script(job, allocation), out, "sbatch {}")


@app.command()
def kubernetes(
    spec: Spec,
    image: Annotated[str, typer.Option(help="Container image with LMWorks in it.")],
    claim: Annotated[str, typer.Option(help="PersistentVolumeClaim for data and runs (ReadWriteMany).")],
    overrides: Overrides = None,
    kind: Annotated[str, typer.Option(help="pytorchjob, trainjob, or job (needs no operator).")] = "pytorchjob",
    nodes: Nodes = None,
    gpus_per_node: PerNode = None,
    mount: Annotated[str, typer.Option(help="Where the claim is mounted; relative paths start there.")] = "/work",
    grace: Grace = 300,
    run_dir: RunDir = "",
    out: Out = None,
) -> None:
    """Write a PyTorchJob, a TrainJob or an Indexed Job.

    \b
    Examples:
      lmworks launch kubernetes configs/tiny.toml parallel.dp=8 --nodes 2 --image registry/lmworks --claim shared
      lmworks launch kubernetes gpt2-small parallel.dp=8 --nodes 2 --image registry/lmworks --claim shared --kind job
    """
    from ..launch import KINDS, Pods, manifests, to_yaml

    if kind not in KINDS:
        raise SpecError(f"--kind {kind!r} is unknown{did_you_mean(kind, KINDS)}")
    job = make_job(spec, overrides, nodes, gpus_per_node, run_dir)
    write_or_print(to_yaml(manifests(job, Pods(image, claim, mount, grace), kind)), out, "kubectl apply -f {}")


@app.command()
def ray(
    spec: Spec,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ray workers: one a rank of the layout.")] = None,
    run_dir: RunDir = "",
    out: Out = None,
) -> None:
    """Write a Ray Train driver with a TorchTrainer.

    \b
    Examples:
      lmworks launch ray configs/tiny.toml parallel.dp=2 cluster.device=cpu --workers 2 -o driver.py
    """
    from ..launch import Job, ray_driver

    loaded = load_run(spec, overrides or ())
    world = loaded.ranks
    if workers not in (None, world):
        raise SpecError(f"--workers {workers}: the layout has {world} ranks (pp × dp × cp × tp), one a worker")
    folder = Path(run_dir or f"runs/{loaded.name}").absolute()
    check_vocabulary(loaded)
    # Ray's workers start in folders of their own.
    job = Job.of(with_absolute_paths(loaded), spec, overrides or (), nodes=world, per_node=1, run_dir=str(folder))
    storage = str(Path(job.run_dir).parent / "ray")
    write_or_print(ray_driver(job, storage), out, "python {}")


def make_job(source: str, overrides: list[str] | None, nodes: int | None, per_node: int | None, run_dir: str) -> Job:
    from ..launch import Job

    loaded = load_run(source, overrides or ())
    check_vocabulary(loaded)
    return Job.of(loaded, source, overrides or (), nodes=nodes, per_node=per_node, run_dir=run_dir)


def write_or_print(text: str, out: Path | None, command: str) -> None:
    """Print the job, or write it and print the command that starts it."""
    if out is None:
        typer.echo(text, nl=False)
        return
    write_file(out, text, "--out")
    typer.echo(f"wrote {out}; start it with: {command.format(out)}")


# --- a written spec: data and command --------------------------------------------------------------------------------


def check_vocabulary(spec: RunSpec) -> None:
    """As training does, for data on this machine; others are checked where the run starts."""
    from ..data.pipeline import check_vocabulary

    for index in prepared(spec.data).values():
        if index:
            check_vocabulary(spec, index.vocab_size)


def prepared(data: DataSpec) -> dict[str, Index | None]:
    """The index of each folder that a spec names; None where it is not here, or is made on first use."""
    from ..data.index import read_index

    return {path: read_index(path) if path and Path(path).exists() else None for path in data.sources}


def print_written(spec: RunSpec, out: Path) -> None:
    """What the written spec trains on, and the command that starts it: here, or where the GPUs are."""
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

    if not torch.cuda.is_available() or torch.cuda.device_count() < cluster.gpus:
        return False
    return recognise(torch.cuda.get_device_name(), cluster.catalogue) == cluster.accelerator
