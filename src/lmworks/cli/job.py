"""Options that describe a run on a cluster, beside a spec's own keys."""

from __future__ import annotations

from typing import Annotated

import typer

OnCluster = Annotated[
    str | None, typer.Option("--cluster", help="What it runs on, e.g. 256xh100 or 2x8xa100 (by default the spec's).")
]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Tokens of a sequence (data.seq).")]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences a rank runs at once.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", min=1, help="Sequences of a step.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Precision of products: bf16, fp16 or fp32.")]


def print_host(each: float, ranks: int) -> None:
    """What a rank, and all of its machine, keep in host memory; nothing where that is none."""
    if each:
        whole = f", {ranks * each / 2**30:.1f} GiB for the {ranks} of a machine" if ranks > 1 else ""
        typer.echo(
            f"host memory: {each / 2**30:.1f} GiB a rank{whole}; what a machine has is not in the catalogue, and a run "
            "is refused where activations have no room"
        )
