"""`lmworks bench collectives` and `lmworks bench link`: what the links between ranks do, and a link of a given kind."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import Progress, console_progress, silent
from ..record.formatting import binary_bytes, duration
from ..spec import SpecError, TrainingError
from ..spec.errors import did_you_mean
from ..spec.files import check_writable
from .output import Json, as_json, print_json, print_table, write_file

if TYPE_CHECKING:
    from ..bench.collectives import Row, Sweep
    from ..bench.shaped_link import ShapedLink
    from ..plan.devices.alpha_beta import AlphaBeta

DEFAULT_SIZES = {"cpu": "1K:16M", "cuda": "1K:1G"}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
ALIASES = {"send-recv": "send", "sendrecv": "send", "alltoall": "all-to-all", "allreduce": "all-reduce"}
ALIASES |= {"allgather": "all-gather", "reducescatter": "reduce-scatter"}
BUFFERS = 2  # that a rank holds for each size


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


# --- what was asked for ----------------------------------------------------------------------------------


def choose_device(backend: str) -> str:
    import torch

    if backend not in ("auto", "gloo", "nccl"):
        raise SpecError(f"--backend {backend}: choose gloo or nccl")
    if backend == "nccl" and not torch.cuda.is_available():
        raise SpecError("--backend nccl: NCCL wants a GPU for each rank, and this machine has none; use --backend gloo")
    return "cuda" if backend == "nccl" or (backend == "auto" and torch.cuda.device_count() > 1) else "cpu"


def place_ranks(device: str, ranks: int | None, link: str, started: bool) -> tuple[int, int]:
    """(nodes, ranks in all)."""
    import torch

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if started:
        world = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if ranks not in (None, world):
            raise SpecError(f"--ranks {ranks}: torchrun has started {world}; leave --ranks out")
        if link:
            raise SpecError("--link starts its ranks itself: leave torchrun out")
        check_gpus(device, local, gpus)
        return world // local, check_count(world)
    if link and device == "cuda":
        raise SpecError("--link shapes TCP between two namespaces of one machine: use --backend gloo")
    world = check_count(ranks if ranks is not None else gpus or 2)
    check_gpus(device, world, gpus)
    if link and world % 2:
        raise SpecError(f"--ranks {world}: a link joins two nodes with as many ranks each; use an even number")
    return (2 if link else 1), world


def check_count(world: int) -> int:
    if world < 2:
        raise SpecError(f"--ranks {world}: a collective needs at least 2 ranks")
    if world > 64 and "WORLD_SIZE" not in os.environ:
        raise SpecError(f"--ranks {world}: this command starts at most 64 on one machine; use torchrun for more")
    return world


def check_gpus(device: str, local: int, gpus: int) -> None:
    if device == "cuda" and local > gpus:
        raise SpecError(
            f"--backend nccl: NCCL wants a GPU for each rank: {local} ranks, and this machine has {gpus}; "
            "use fewer ranks or --backend gloo"
        )


def make_sweep(
    device: str,
    sizes: str,
    ops: str,
    dtypes: str,
    groups: str,
    rounds: int,
    seconds: float,
    world: int,
    nodes: int,
) -> Sweep:
    from ..bench.collective_ops import DTYPES, OPS
    from ..bench.collectives import DEFAULT_DTYPE, Sweep

    chosen = tuple(name for name in (ALIASES.get(word, word) for word in words(ops.replace("_", "-")))) or OPS
    kinds = tuple(words(dtypes)) or (DEFAULT_DTYPE[device],)
    for option, names, known in (("--ops", chosen, OPS), ("--dtypes", kinds, tuple(DTYPES))):
        for name in names:
            if name not in known:
                raise SpecError(f"{option}: there is no {name!r}{did_you_mean(name, known)}")
    return Sweep(
        device,
        parse_sizes(sizes or DEFAULT_SIZES[device]),
        chosen,
        kinds,
        groups=parse_groups(groups, world, nodes),
        rounds=rounds,
        point_s=seconds,
    )


def words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip().lower() for word in text.split(",") if word.strip()))


def parse_groups(text: str, world: int, nodes: int) -> tuple[str, ...]:
    """By default all ranks; on several nodes the groups inside them and between them apart."""
    names = words(text)
    if not names:
        return ("all",) if nodes == 1 else ("inter",) if world == nodes else ("intra", "inter", "all")
    for name in names:
        if name.isdecimal() and 2 <= int(name) <= world:
            continue
        if name not in ("all", "intra", "inter"):
            raise SpecError(f"--groups {name}: use all, intra, inter, or a number of ranks from 2 to {world}")
        if name == "inter" and nodes == 1:
            raise SpecError("--groups inter: all ranks are on one node; use --link, or torchrun on several nodes")
        if name == "intra" and world == nodes:
            raise SpecError("--groups intra: every node has one rank; use more --ranks")
    return tuple(names)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`1K:1G` from … to, times 4; `1K:1G:2` times 2; `1K,64K,1M` a list."""
    if ":" in text:
        ends = text.split(":")
        first, last = (parse_size(word, text) for word in ends[:2])
        factor = ends[2] if len(ends) == 3 else "4"
        if len(ends) > 3 or not re.fullmatch(r"\d+", factor) or int(factor) < 2:
            raise SpecError(f"--sizes {text}: write FROM:TO or FROM:TO:FACTOR with a factor from 2, e.g. 1K:1G:2")
        if first > last:
            raise SpecError(f"--sizes {text}: {ends[0]} is more than {ends[1]}")
        found = [first]
        while found[-1] * int(factor) <= last:
            found.append(found[-1] * int(factor))
        return tuple(found)
    return tuple(sorted({parse_size(word, text) for word in text.split(",")}))


def parse_size(word: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)I?B?", word.strip().upper())
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if not 1 <= size <= 2**40:
        raise SpecError(f"--sizes {text}: {word.strip()!r} is no size; write e.g. 1K:1G or 4K,64K,1M")
    return size


def check_memory(sweep: Sweep, local: int) -> None:
    from ..plan.memory.host import available_bytes

    needed = (BUFFERS * sum(sweep.sizes) + 2 * max(sweep.sizes)) * local  # the largest is checked
    there = available_bytes()
    if sweep.device == "cpu" and there is not None and needed > there:
        raise SpecError(
            f"--sizes: {local} ranks with messages up to {binary_bytes(max(sweep.sizes))} need about "
            f"{binary_bytes(needed)}, and {binary_bytes(there)} are free; use smaller messages"
        )


def check_outputs(sweep: Sweep, profile: Path | None, plot: Path | None, out: Path | None) -> None:
    """Before the work."""
    import torch

    from ..bench.link_profile import check_profile
    from ..plan.devices.profile import load_profile
    from ..report.plots import check_plot_path

    if profile is not None:
        if not profile.exists():
            raise SpecError(f"--profile {profile} is not there; write it with `lmworks plan calibrate --out {profile}`")
        check_profile(load_profile(profile), torch.device(sweep.device), sweep.ops)
        if len(sweep.sizes) < 2:
            raise SpecError("--profile: a plan needs at least two --sizes")
        check_writable(profile, "--profile")
    if plot is not None:
        check_plot_path(plot, "--plot")
    if out is not None:
        check_writable(out, "--out")


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
    columns = ["bytes", "out of place", "± ", "algbw", "busbw", "in place", "±", "algbw ", "busbw ", "wrong"]
    tables: dict[tuple[Any, ...], dict[int, dict[bool, Row]]] = {}
    for row in rows:
        tables.setdefault((row.op, row.group, row.ranks, row.dtype), {}).setdefault(row.bytes, {})[row.in_place] = row
    for (op, group, ranks, dtype), by_size in tables.items():
        lines = []
        for size, pair in by_size.items():
            wrong = sum(row.wrong for row in pair.values())
            lines.append([binary_bytes(size), *cells(pair.get(False)), *cells(pair.get(True)), wrong])
        print_table(f"{op}, {group}: {ranks} ranks, {dtype}; GB/s", columns, lines, drop=("± ", "±"))
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
    from ..plan.devices.network import wire_share

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
        columns = ["seconds = α + β · bytes", "from", "α", "95 %", "β, ns/byte", "95 % ", "busbw limit, GB/s"]
        print_table("Fits", columns, lines, drop=("95 % ", "95 %"))


# --- bench link ------------------------------------------------------------------------------------------


def link(
    shape: Annotated[str, typer.Argument(metavar="LINK", help="Bandwidth, delay one way, loss: 200mbit,5ms,0.1%.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Runs once on each of the two nodes.")],
) -> None:
    """Run a command on two nodes of this machine, over a shaped link.

    The nodes are network namespaces (Linux, root, iproute2). Each runs the command as one rank of two, with RANK,
    WORLD_SIZE and MASTER_ADDR set as torchrun sets them.

    \b
    Examples:
      lmworks bench link 200mbit,5ms -- lmworks train configs/tiny.toml parallel.dp=2
      lmworks bench link 1gbit -- python train.py
    """
    from ..bench.shaped_link import LinkShape, run_on_both, shaped_link

    with shaped_link(LinkShape.parse(shape)) as shaped:
        for what, how in shaped.how.items():
            typer.echo(f"{what} of the link: {how}", err=True)
        name = Path(sys.argv[0]).name
        words = [sys.executable, "-m", "lmworks", *command[1:]] if command[0] == name == "lmworks" else command
        codes = run_on_both(shaped, words)
    if any(codes):
        raise TrainingError(f"the command ended with exit codes {codes[0]} and {codes[1]} on the two nodes")
