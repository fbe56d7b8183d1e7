"""`lmworks prove simulate`: one rank of a large world on this machine, without the others and without the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .output import Json, Overrides, Spec, print_json, print_table

if TYPE_CHECKING:
    from ..prove.simulate import Report


def simulate(
    spec: Spec,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", help="Ranks that the layout must have (0: whatever it has).")] = 0,
    rank: Annotated[int, typer.Option("--rank", help="The rank to simulate.")] = 0,
    layers_per_stage: Annotated[
        int,
        typer.Option("--layers-per-stage", min=0, help="Extrapolate from this many layers and one more (0: 2 and 3)."),
    ] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="Simulate every layer, and extrapolate nothing.")] = False,
    json: Json = False,
) -> None:
    """Step one rank of a layout on a CPU: collectives, peak memory.

    The code is that of a real run; the other ranks, the numbers and the memory are not there. Layers are alike, so a
    few of them tell the rest: the report says whether it is exact or how it was extrapolated.

    \b
    Examples:
      lmworks prove simulate gpt2-small parallel.strategy=fsdp2 parallel.dp=64 --rank 63
      lmworks prove simulate llama3-70b parallel.tp=8 parallel.sp=true parallel.pp=8 parallel.strategy=fsdp2 \\
        parallel.dp=16 data.seq=8192 data.micro_batch=1 precision.dtype=bf16 cluster.device=cuda \\
        --world 1024 --rank 777
    """
    from ..spec import SpecError, load_run

    run = load_run(spec, overrides or ())
    layout = run.parallel
    if world and world != layout.world:
        raise SpecError(
            f"--world {world}, but the layout has {layout.world} ranks: pp × dp × cp × tp = "
            f"{layout.pp} × {layout.dp} × {layout.cp} × {layout.tp}"
        )
    if exact and layers_per_stage:
        raise SpecError("--exact simulates every layer: leave out --layers-per-stage")
    from ..prove.simulate import simulate as simulate_rank

    report = simulate_rank(run, rank, layers_per_stage=layers_per_stage, exact=exact)
    if json:
        print_json({"name": run.name, **report.to_dict()})
    else:
        show(report)


def show(report: Report) -> None:
    from ..record.figures import binary_bytes, duration

    found = report.simulation
    place = ", ".join(f"{axis} {index}" for axis, index in report.place.items() if index) or "first on every axis"
    layers = ", ".join(f"{stage.layers.start}–{stage.layers.stop - 1}" for stage in report.stages)
    typer.echo(f"rank {report.rank} of {report.world} ({place}): layers {layers}, {report.micro_batches} micro-batches")
    typer.echo(f"parameters {found.parameters:,} ({binary_bytes(found.parameter_bytes)})")
    rows = [[row.kind, row.group, row.ranks, row.count, binary_bytes(row.bytes)] for row in found.collectives]
    print_table("Collectives of one step", ["kind", "group", "ranks", "count", "bytes"], rows)
    memory = [[name, binary_bytes(found.resident[name]), binary_bytes(size)] for name, size in found.peak.items()]
    memory.append(["total", binary_bytes(sum(found.resident.values())), binary_bytes(found.peak_bytes)])
    print_table("Memory", ["what", "before the update", f"at the peak ({found.moment})"], memory)
    typer.echo(report.how)
    for note in report.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"simulated in {duration(report.seconds)}")
