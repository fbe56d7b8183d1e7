"""`lmworks bench collectives`: what the links between ranks do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import Progress, console_progress, silent
from ..record.formatting import binary_bytes, duration
from ..spec import SpecError, TrainingError
from .collective_request import check_memory, check_outputs, choose_device, make_sweep, place_ranks
from .output import Json, as_json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..bench.collectives import Row, Sweep
    from ..bench.shaped_link import ShapedLink
    from ..plan.devices.alpha_beta import AlphaBeta


def collectives(
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks to start (one a GPU; 2 on a CPU).")] = None,
    backend: Annotated[str, typer.Option("--backend", help="gloo (CPU), nccl (a GPU each), or auto.")] = "auto",
    sizes: Annotated[
        str, typer.Option("--sizes", help="Bytes: 1K:1G (times 4), 1K:1G:2 (times 2), or a list 64K,1M.")
    ] = "",
    ops: Annotated[str, typer.Option("--ops", help="e.g. all-reduce,send (by default all six).")] = "",
    dtypes: Annotated[str, typer.Option("--dtypes", help="e.g. fp32,bf16 (CPU: fp32; GPU: bf16).")] = "",
    groups: Annotated[
        str,
        typer.Option(
            "--groups", help="all, intra (ranks of a node), inter (one rank a node), or a number: the first so many."
        ),
    ] = "",
    link: Annotated[
        str, typer.Option("--link", help="Ranks on two nodes with such a link between: 200mbit,5ms,0.1% (root).")
    ] = "",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Rounds of each point; the median is reported.")] = 7,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="About how long a point is timed.")] = 0.2,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Put α and β into this profile of `lmworks plan calibrate`.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON, too.")] = None,
    json: Json = False,
) -> None:
    """Time collectives between ranks: algbw, busbw, α and β.

    By nccl-tests' definitions, in and out of place; every result is checked. Starts its ranks on this machine, or joins
    those of torchrun. PyTorch's all-reduce and broadcast are in place: out of place, a copy is part of their time.

    \b
    Examples:
      lmworks bench collectives
      lmworks bench collectives --ranks 4 --groups 2,all --ops all-reduce,all-gather --sizes 4K:4M
      lmworks bench collectives --link 200mbit,5ms --profile profile.toml --plot link.png
      torchrun --nnodes 2 --nproc-per-node 8 -m lmworks bench collectives --backend nccl --json
    """
    try:
        started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        device = choose_device(backend)
        nodes, world = place_ranks(device, ranks, link, started)
        sweep = make_sweep(device, sizes, ops, dtypes, groups, rounds, seconds, world, nodes)
        check_memory(sweep, world if not started else int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        check_outputs(sweep, profile, plot, out)
    except SpecError as error:
        error.collective = True
        raise
    first = os.environ.get("RANK", "0") == "0"
    with console_progress() if first else nullcontext(silent) as progress:
        found, shaped = measured(sweep, world, nodes, link, started, progress)
    if not first:
        return
    facts = result(sweep, found, world, nodes, shaped)
    write_results(facts, sweep, found, nodes, profile, plot, out)
    if json:
        print_json(facts)
    else:
        print_collectives(facts, found, profile, plot)
    if missed := sum(row.wrong for row in found):
        raise TrainingError(f"{missed} elements of results were wrong; the rows say where")


def measured(
    sweep: Sweep, world: int, nodes: int, link: str, started: bool, progress: Progress
) -> tuple[list[Row], ShapedLink | None]:
    from ..bench.collectives import measure, run_under_torchrun
    from ..bench.shaped_link import LinkShape, shaped_link

    if started:
        return run_under_torchrun(sweep, progress), None
    if not link:
        return measure(sweep, world, nodes, progress=progress), None
    with shaped_link(LinkShape.parse(link)) as shaped:
        return measure(sweep, world, nodes, shaped.enter, progress), shaped


# --- the result ------------------------------------------------------------------------------------------


def result(sweep: Sweep, rows: Sequence[Row], world: int, nodes: int, shaped: ShapedLink | None) -> dict[str, Any]:
    import torch

    from ..bench.collectives import BACKENDS
    from ..bench.kernel_timing import device_name
    from ..bench.link_profile import fits_of

    return {
        "backend": BACKENDS[sweep.device],
        "device": device_name(torch.device(sweep.device)),
        "ranks": world,
        "nodes": nodes,
        "link": {"shape": str(shaped.shape), **shaped.how} if shaped else None,
        "torch": torch.__version__,
        "rows": [row.to_dict() for row in rows],
        "fits": [{**series(row), "fit": fit.to_dict()} for row, fit in fits_of(rows)],
    }


def series(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("op", "group", "ranks", "dtype", "in_place")}


def write_results(
    facts: dict[str, Any],
    sweep: Sweep,
    rows: Sequence[Row],
    nodes: int,
    profile: Path | None,
    plot: Path | None,
    out: Path | None,
) -> None:
    if out is not None:
        write_file(out, as_json(facts) + "\n", "--out")
    if profile is not None:
        import torch

        from ..bench.calibrate import save
        from ..bench.link_profile import with_measured
        from ..plan.devices.profile import load_profile

        place = torch.device(sweep.device)
        save(with_measured(load_profile(profile), rows, sweep.sizes, place, nodes), profile)
    if plot is not None:
        from ..report.bandwidth_plot import draw_bandwidths

        draw_bandwidths(facts["rows"], facts["fits"], heading(facts), plot)


def heading(facts: dict[str, Any]) -> str:
    link = f", link {facts['link']['shape']}" if facts["link"] else ""
    nodes = f" on {facts['nodes']} nodes" if facts["nodes"] > 1 else ""
    return f"{facts['backend']}, {facts['ranks']} ranks{nodes}{link}, {facts['device']}"


def print_collectives(facts: dict[str, Any], rows: Sequence[Row], profile: Path | None, plot: Path | None) -> None:
    typer.echo(heading(facts))
    for what, how in (facts["link"] or {}).items():
        if what != "shape":
            typer.echo(f"{what} of the link: {how}")
    columns = ["bytes", "out of place", "±", "algbw", "busbw", "in place", "in ±", "in algbw", "in busbw", "wrong"]
    tables: dict[tuple[Any, ...], dict[int, dict[bool, Row]]] = {}
    for row in rows:
        tables.setdefault((row.op, row.group, row.ranks, row.dtype), {}).setdefault(row.bytes, {})[row.in_place] = row
    for (op, group, ranks, dtype), by_size in tables.items():
        lines = []
        for size, pair in by_size.items():
            wrong = sum(row.wrong for row in pair.values())
            lines.append([binary_bytes(size), *cells(pair.get(False)), *cells(pair.get(True)), wrong])
        print_table(f"{op}, {group}: {ranks} ranks, {dtype}; GB/s", columns, lines, drop=("in ±", "±"))
    print_fits(facts)
    if profile is not None:
        typer.echo(f"α and β are in {profile}; plan with it: lmworks plan SPEC cluster.profile={profile}")
    if plot is not None:
        typer.echo(f"drawn: {plot}")


def cells(row: Row | None) -> list[str]:
    if row is None:
        return ["-", "", "-", "-"]
    spread = (row.time_us_high - row.time_us_low) / 2 / row.time_us
    return [duration(1e-6 * row.time_us), f"{spread:.0%}", f"{row.algbw:.3g}", f"{row.busbw:.3g}"]


def print_fits(facts: dict[str, Any]) -> None:
    from ..plan.devices.alpha_beta import AlphaBeta
    from ..plan.devices.links import wire_share

    lines = []
    for one in facts["fits"]:
        fit: AlphaBeta = AlphaBeta.from_dict(one["fit"])
        factor = float(wire_share(one["op"], one["ranks"]))
        for regime in fit.regimes:
            low, high = regime.alpha_range
            beta = f"{1e9 * regime.beta:.4g}"
            span = f"{1e9 * regime.beta_range[0]:.3g} – {1e9 * regime.beta_range[1]:.3g}"
            limit = f"{factor / regime.beta / 1e9:.3g}" if regime.beta else "-"
            place = "in place" if one["in_place"] else "out of place"
            name = f"{one['op']}, {one['group']}, {one['ranks']} ranks, {one['dtype']}, {place}"
            start = binary_bytes(regime.above) if regime.above else "0"
            ends = f"{duration(low)} – {duration(high)}"
            lines.append([name, start, duration(regime.alpha), ends, beta, span, limit])
    if lines:
        columns = ["seconds = α + β · bytes", "from", "α", "95 % of α", "β, ns/byte", "95 % of β", "busbw limit, GB/s"]
        print_table("Fits", columns, lines, drop=("95 % of β", "95 % of α"))
