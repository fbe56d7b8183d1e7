"""`lmworks plan collective`: algorithms of a collective on a cluster, their crossover sizes, and their schedules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import binary_bytes, duration, short
from ..spec import SpecError, parse_cluster
from ..spec.load import apply_overrides
from ..spec.schema import merge
from . import options
from .options import parse_bytes
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..plan.collective_algorithms.compare import Comparison
    from ..plan.collective_algorithms.costs import Group
    from ..plan.collective_algorithms.schedules import Schedule

MOST_RANKS = 16  # of a schedule that is printed
FAR_BELOW = 0.25  # share of a link's datasheet that is worth a word


def collective(
    collective: Annotated[
        str,
        typer.Argument(metavar="COLLECTIVE", help="all_reduce, reduce_scatter, all_gather, broadcast or all_to_all."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[cluster.KEY=VALUE]...", help="Changes to the cluster, e.g. cluster.network=roce."),
    ] = None,
    size: Annotated[
        str, typer.Option("--bytes", help="The whole buffer, as nccl-tests counts it: 256M is 256 MiB.")
    ] = "256M",
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks (by default all of the cluster).")] = None,
    stride: Annotated[
        int,
        typer.Option("--stride", min=1, help="Accelerators from one rank to the next; 8: one in each machine of 8."),
    ] = 1,
    cluster: Annotated[
        str,
        typer.Option("--cluster", help="What it runs on, e.g. 1024xh100 or 2x8xa100.", autocompletion=options.clusters),
    ] = "",
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="ALGORITHM", help="Print the rounds of this one; up to 16 ranks.")
    ] = "",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw time over size.")] = None,
    json: Json = False,
) -> None:
    """Compare algorithms of a collective on a cluster.

    Ring, trees, recursive halving and doubling, hierarchical, in-network (NVLS, SHARP) and others: rounds, bytes,
    latency (α) and bandwidth (β) terms, the fastest, and the sizes at which another one becomes it.

    \b
    Examples:
      lmworks plan collective all_reduce --bytes 256M --ranks 1024 --cluster 1024xh100
      lmworks plan collective all_gather --bytes 1M --cluster 64xa100 cluster.network=roce --json
      lmworks plan collective all_reduce --cluster 512xh100 --ranks 64 --stride 8 --plot all_reduce.png
      lmworks plan collective all_reduce --cluster 4xh100 --schedule double_tree
    """
    from ..plan.collective_algorithms.compare import compare
    from ..plan.collective_algorithms.costs import algorithms

    usable = [one.name for one in algorithms(collective)]
    nbytes = parse_bytes(size, "--bytes")
    group = read_group(cluster, overrides or [], ranks, stride)
    if schedule:
        show_schedule(collective, schedule, usable, group, nbytes, json)
        return
    if plot:
        from ..report.plots import check_plot_path

        check_plot_path(plot, "--plot")
    found = compare(collective, nbytes, group)
    if plot:
        from ..report.collective_plot import draw_collective

        draw_collective(found, plot)
    if json:
        print_json(found.to_dict())
    else:
        print_comparison(found)
        if plot:
            typer.echo(f"drawn: {plot}")


def read_group(text: str, overrides: list[str], ranks: int | None, stride: int) -> Group:
    from ..plan.collective_algorithms.costs import Group
    from ..spec import Cluster

    other = [word for word in overrides if not word.startswith("cluster.")]
    if other:
        raise SpecError(f"{other[0]!r}: this command takes keys of the cluster, e.g. cluster.network=roce")
    given = apply_overrides({}, overrides).get("cluster", {})
    typed = parse_cluster(text, given.get("catalogue", "")).to_dict() if text else {}
    machines = Cluster.from_dict(merge(typed, given))
    gpu = machines.accelerator
    if gpu is None:
        raise SpecError("--cluster: what does it run on? Give e.g. --cluster 1024xh100")
    return Group.of(machines, gpu, (machines.gpus // stride) if ranks is None else ranks, stride)


def print_comparison(found: Comparison) -> None:
    group = found.group
    where = f"{group.machines:,} machines, {group.members} in each" if group.machines > 1 else "one machine"
    title = f"{found.collective} of {binary_bytes(found.nbytes)} among {group.ranks:,} {group.fabric.gpu}: {where}"
    rows = []
    for row in found.rows:
        traffic = row.traffic
        rows.append(
            [
                row.algorithm.name,
                f"{traffic.inside_rounds} + {traffic.across_rounds}",
                f"{binary_bytes(traffic.inside * found.nbytes)} + {binary_bytes(traffic.across * found.nbytes)}",
                duration(row.alpha_s),
                duration(row.beta_s),
                duration(row.seconds),
                f"{short(found.busbw(row.seconds))}B/s",
                row.algorithm.nccl or "-",
            ]
        )
    columns = ["algorithm", "rounds", "bytes of a rank", "α", "β", "time", "busbw", "NCCL_ALGO"]
    print_table(title, columns, rows, drop=("busbw", "NCCL_ALGO", "bytes of a rank", "rounds"))
    for name, reason in found.missing.items():
        typer.echo(f"{name}: {reason}")
    best, own = found.winner, next((row for row in found.rows if row.algorithm.nccl), None)
    also = f"; of those in NCCL {own.algorithm.name}, {duration(own.seconds)}" if own and own is not best else ""
    typer.echo(f"fastest: {best.algorithm.name}, {duration(best.seconds)}{also}")
    typer.echo(f"the planner takes {duration(found.planned_s)}: {planner_source(found)}")
    typer.echo(f"fastest by size: {spans_text(found.crossovers)}")
    if found.nccl_crossovers != found.crossovers:
        typer.echo(f"of those in NCCL: {spans_text(found.nccl_crossovers)}")
    typer.echo("rounds and bytes: in a machine + between machines; α: latency, β: bytes over bandwidth, which overlap")
    if text := far_below_datasheet(group):
        typer.echo(text)


def spans_text(spans: list[tuple[str, float, float]]) -> str:
    return ", ".join(f"{name} from {binary_bytes(low)}" for name, low, _ in spans)


def far_below_datasheet(group: Group) -> str:
    """Why links that were measured are much slower than they should be; "" where they are not."""
    fabric, rate = group.fabric, group.link_rate / 1e9
    measured = fabric.curve is not None and fabric.gpu in fabric.curve.gpus
    if fabric.kind != "pcie" or not measured or rate > FAR_BELOW * fabric.link_gbs:
        return ""
    return (
        f"links: {group.members} {fabric.gpu} in a machine send {rate:.1f} GB/s each, measured with NCCL, of "
        f"{fabric.link_gbs:g} by their datasheet: without peer-to-peer over PCIe all bytes pass through host memory"
    )


def planner_source(found: Comparison) -> str:
    group = found.group
    if group.machines == 1:
        tag = group.fabric.tag(found.collective.replace("_", "-"), group.ranks, group.stride)
        return f"NCCL in one machine, {tag}, whatever algorithm it chose"
    return {
        "all_reduce": "the faster of ring and double_tree",
        "all_to_all": "pairwise",
    }.get(found.collective, "ring")


def show_schedule(collective: str, algorithm: str, usable: list[str], group: Group, nbytes: int, json: bool) -> None:
    from ..plan.collective_algorithms.schedules import schedule

    if algorithm not in usable:
        raise SpecError(f"--schedule {algorithm!r}: {collective} has {', '.join(usable)}")
    if group.ranks > MOST_RANKS:
        raise SpecError(f"--schedule: {group.ranks:,} ranks do not fit a page; give --ranks {MOST_RANKS} or fewer")
    if algorithm == "in_network":
        raise SpecError("--schedule in_network: switches do the work, ranks send nothing to one another")
    members = group.members if group.machines > 1 else 1
    found = schedule(collective, algorithm, group.ranks, members)
    if json:
        print_json(schedule_dict(found, nbytes))
        return
    typer.echo(
        f"{collective} by {algorithm}, {found.ranks} ranks: {len(found.rounds)} rounds, "
        f"the buffer in {found.chunks} chunks, at most {binary_bytes(found.most_sent * nbytes)} sent by a rank"
    )
    rows = [
        [number, f"{move.src} → {move.dst}", chunk_names(found, move.chunks), "add" if move.reduce else "copy"]
        for number, turn in enumerate(found.rounds, 1)
        for move in turn
    ]
    print_table("", ["round", "ranks", "chunks", "there"], rows)


def chunk_names(found: Schedule, chunks: tuple[int, ...]) -> str:
    if found.collective == "all_to_all":
        return ", ".join(f"{chunk // found.ranks}→{chunk % found.ranks}" for chunk in chunks)
    return ", ".join(map(str, chunks))


def schedule_dict(found: Schedule, nbytes: int) -> dict[str, Any]:
    return {
        "collective": found.collective,
        "algorithm": found.algorithm,
        "ranks": found.ranks,
        "chunks": found.chunks,
        "bytes_sent": [found.sent(rank) * nbytes for rank in range(found.ranks)],
        "rounds": [
            [{"src": move.src, "dst": move.dst, "chunks": list(move.chunks), "reduce": move.reduce} for move in turn]
            for turn in found.rounds
        ],
    }
