"""Options that describe a run on a cluster, beside a spec's own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import complete

if TYPE_CHECKING:
    from ..plan.memory.host_need import HostNeed

OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="What it runs on, e.g. 256xh100 or 2x8xa100 (by default the spec's).",
        autocompletion=complete.clusters,
    ),
]
OnDevice = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to run (by default as cluster.device says).")
]
Force = Annotated[bool, typer.Option("--force", help="Start even what does not fit into the memory of this machine.")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Tokens of a sequence (data.seq).")]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences a rank runs at once.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", min=1, help="Sequences of a step.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Precision of products: bf16, fp16, fp32 or fp8.")]
UNKNOWN = "what a machine has is not in the catalogue, and a run is refused where there is no room"


def print_host_memory(each: float, whole: float, ranks: int, parts: HostNeed | None, there: int | None = None) -> None:
    """Prints the host memory of a rank and of its machine, by use; nothing where there is none."""
    if not whole:
        return
    known = f"{there / 2**30:.1f} GiB are free here" if there is not None else UNKNOWN
    besides = f", {whole / 2**30:.1f} GiB for the {ranks} of a machine" if ranks > 1 else ""
    typer.echo(f"host memory: {each / 2**30:.1f} GiB a rank{besides}; {known}")
    if parts:
        found = [f"{name} {size / 2**30:.1f} GiB" for name, size in parts.to_dict().items() if size]
        typer.echo(f"of a machine: {', '.join(found)}")


def device_options(device: str, force: bool) -> list[str]:
    """--device and --force, for the ranks that are started."""
    return [*(["--device", device] if device else []), *(["--force"] if force else [])]


def on_device(device: str) -> list[str]:
    """--device, as a change to the spec."""
    return [f"cluster.device={device}"] if device else []
