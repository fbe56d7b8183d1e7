"""`lmworks plan hardware`, `models`, `mesh` and `pipeline`: accelerators, presets, ranks of a layout, pipeline
schedules.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import binary_bytes, duration, short
from ..spec import PRESETS, Cluster, Gpu, Grid, ModelSpec, RunSpec, SpecError, catalogue, load_run
from ..spec.hardware import find_gpu_name
from ..spec.presets import PLAN_ONLY
from . import options
from .options import Overrides, Spec
from .output import Json, print_json, print_table
from .ranks import needs_ranks, start_ranks

if TYPE_CHECKING:
    from ..plan.devices.machine import Machine
    from ..plan.pipelines.schedule import Span


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One accelerator, with its sources.", autocompletion=options.gpus),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure this machine again, and cache the result.")] = False,
    json: Json = False,
) -> None:
    """List accelerators and their sources, or measure this machine.

    \b
    Examples:
      lmworks plan hardware
      lmworks plan hardware H100-SXM-80GB
      lmworks plan hardware --probe
    """
    if probe:
        if name:
            raise SpecError("--probe measures this machine; it takes no name")
        from ..bench.calibrate import this_machine

        machine = this_machine(Cluster(), refresh=True)
        print_json(machine.to_dict()) if json else print_machine(machine)
        return
    gpus = catalogue()
    name = find_gpu_name(name) if name else None
    if json:
        print_json(gpus[name].to_dict() if name else [gpu.to_dict() for gpu in gpus.values()])
    elif name:
        print_gpu(gpus[name])
    else:
        print_catalogue(list(gpus.values()))


def print_catalogue(gpus: list[Gpu]) -> None:
    columns = {
        "fp32": "fp32_tflops", "bf16": "bf16_tflops", "fp16": "fp16_tflops", "fp8": "fp8_tflops", "GB": "memory_gb",
        "GB/s": "bandwidth_gbs", "link GB/s": "link_gbs", "network GB/s": "nic_gbs", "W": "tdp_w", "$/h": "price_hour",
    }  # fmt: skip
    rows = []
    for gpu in gpus:
        figures = [getattr(gpu, field) for field in columns.values()]
        rows.append([gpu.name, *(f"{figure:g}" if figure else "-" for figure in figures)])
    title = "Accelerators: dense peaks in TFLOP/s, memory in GB = 1e9 bytes (-: unknown)"
    print_table(title, ["name", *columns], rows, drop=("fp32", "W", "fp16", "network GB/s", "link GB/s", "fp8"))
    typer.echo("lmworks plan hardware NAME names the sources; cluster.catalogue = FILE adds accelerators of your own")


def print_gpu(gpu: Gpu) -> None:
    for key, value in gpu.to_dict().items():
        if value:
            typer.echo(f"{key:15}{value:g}" if isinstance(value, float) else f"{key:15}{value}")


def print_machine(machine: Machine) -> None:
    rows = []
    for kind, points in machine.rates.items():
        unit = "FLOP/s" if "." in kind else "B/s"
        for point in points:
            size = " × ".join(f"{n:.0f}" for n in point.shape) if "." in kind else binary_bytes(point.shape[0])
            rows.append([kind, size, f"{short(point.rate)}{unit}"])
    print_table(f"Measured: {machine.name}", ["kernel", "size", "rate"], rows)
    typer.echo(f"one small op: {duration(machine.launch_s)} forward, {duration(machine.launch_backward_s)} backward")
    typer.echo(f"memory: {binary_bytes(machine.memory_bytes)} ({machine.memory_bytes / 1e9:.3g} GB)")
    print_busy(machine)


def print_busy(machine: Machine) -> None:
    """A warning if other processes used the machine while it was measured."""
    if machine.quiet:
        return
    typer.secho(
        f"this machine was busy while it was measured: runs took {machine.noise:.1f} × what they take alone. Figures "
        "are of the machine alone, ranges reach to one that stays as busy; "
        "lmworks plan hardware --probe measures it again",
        fg="yellow",
    )


# --- models ----------------------------------------------------------------------------------------------


def models(json: Json = False) -> None:
    """List the model presets with their exact parameter counts.

    \b
    Examples:
      lmworks plan models
      lmworks plan models --json
    """
    specs = {name: ModelSpec.from_preset(name) for name in PRESETS}
    if json:
        print_json(
            [
                {"name": name, "params": s.params, "active_params": s.active_params, **s.to_dict()}
                for name, s in specs.items()
            ]
        )
        return
    columns = ["name", "parameters", "layers", "hidden", "heads", "kv heads", "vocab", "context"]
    rows = [
        [name, f"{s.params:,}", s.layers, s.hidden, s.heads, s.kv_heads, s.vocab, s.context]
        for name, s in specs.items()
    ]
    print_table("Model presets", columns, rows, drop=("kv heads", "heads", "vocab", "context"))
    typer.echo(f"to plan with, published weights do not load: {', '.join(PLAN_ONLY)}")


# --- mesh ------------------------------------------------------------------------------------------------


def mesh(
    spec: Spec,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank whose neighbours are shown.")] = 0,
    json: Json = False,
) -> None:
    """Show the ranks of a layout and their process groups.

    \b
    Examples:
      lmworks plan mesh configs/tiny.toml parallel.dp=2 parallel.tp=2 parallel.pp=2
      lmworks plan mesh llama3-70b parallel.tp=8 parallel.pp=8 parallel.dp=16 parallel.strategy=fsdp2 --rank 777
    """
    grid = Grid.of(load_run(spec, overrides or ()).parallel)
    if not 0 <= rank < grid.world:
        raise SpecError(f"--rank {rank}: the layout has ranks 0 … {grid.world - 1}")
    place = grid.coordinates(rank)
    rows = grid.table(rank)
    if json:
        axes = {axis: {"size": size, "group": grid.group(axis, rank), "exchange": what} for axis, size, _, what in rows}
        print_json({"world": grid.world, "rank": rank, "place": place, "axes": axes})
        return
    typer.echo(f"{grid.world} ranks; rank {rank} is at " + ", ".join(f"{row[0]} {place[row[0]]}" for row in rows))
    print_table("", ["axis", "ranks", f"group of rank {rank}", "communication"], rows)
    if grid.world <= 64:
        used = [row[0] for row in rows]
        where = [(number, *(grid.coordinates(number)[axis] for axis in used)) for number in range(grid.world)]
        print_table("coordinates of every rank", ["rank", *used], where)


# --- pipeline --------------------------------------------------------------------------------------------


def pipeline(
    spec: Spec,
    overrides: Overrides = None,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the timeline into this file.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a real step on this machine, and time each stage.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the stages of a pipeline, its timeline and its bubble.

    The bubble is the share of a step that each rank idles. The timeline follows from the schedule and needs no ranks;
    with --measure the ranks are started, and those of a real step are shown beside it.

    \b
    Examples:
      lmworks plan pipeline llama3-1b parallel.pp=4 data.global_batch=64
      lmworks plan pipeline cpu-10m parallel.pp=2 parallel.schedule=zbv data.global_batch=32 --png zbv.png
      lmworks plan pipeline tiny parallel.pp=2 data.global_batch=32 --measure
      lmworks plan pipeline gpt2-small parallel.pp=4 parallel.schedule=interleaved data.global_batch=64 --json
    """
    run = load_run(spec, overrides or ())
    if run.parallel.pp == 1:
        raise SpecError("parallel.pp = 1 is no pipeline: give more ranks, e.g. parallel.pp=2")
    if png:
        from ..report.plots import check_plot_path

        check_plot_path(png, "--png")
    if measure and needs_ranks(run):
        options = [*(["--png", str(png)] if png else []), *(["--json"] if json else [])]
        start_ranks(run, ["plan", "pipeline", spec, *(overrides or ()), "--measure", *options])
        return
    real = measured(run) if measure else None
    if measure and real is None:
        return  # another rank reports
    from ..report.plots import draw_timeline

    facts, simulated = describe(run, real)
    if png:
        draw_timeline(real or simulated, png, "seconds" if real else "forward passes of an average stage")
    if json:
        print_json(facts)
        return
    print_stages(facts)
    print_timeline(facts, simulated, real)
    if png:
        typer.echo(f"drawn: {png}")


def measured(run: RunSpec) -> list[Span] | None:
    """Spans of a real step on the pipeline of rank 0; None on the other ranks."""
    from ..parallel.pipeline_timing import measure_step
    from ..parallel.world import init_distributed, is_rank_zero, shutdown
    from ..train.device import pick_device

    device = pick_device(run.cluster)
    mesh = init_distributed(run.parallel, device)
    assert mesh is not None
    try:
        spans = measure_step(run, mesh, device)
    finally:
        shutdown()
    return spans if is_rank_zero() else None


def describe(run: RunSpec, real: list[Span] | None) -> tuple[dict[str, Any], list[Span]]:
    """Everything that is printed, as data; and the simulated timeline of this split."""
    from ..plan.pipelines.bubble import ideal_idle
    from ..plan.pipelines.schedule import durations, idle_shares, simulate, stage_times, stages_of
    from ..plan.pipelines.stages import orders_of, simulated, split_layers

    layout, model, seq = run.parallel, run.model, run.data.seq
    shape = (layout.schedule, layout.pp, layout.virtual_stages, run.accumulation)
    stages = split_layers(model, seq, layout.pp * layout.virtual_stages)
    costs = [stage.cost(model, seq) for stage in stages]
    times, spans = durations(layout.recompute), simulated(run)
    held = [stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank) for rank in range(layout.pp)]
    share, formula = ideal_idle(*shape, times)
    facts = {
        "schedule": layout.schedule,
        "ranks": layout.pp,
        "micro_batches": run.accumulation,
        "stages": [
            {
                "stage": stage.index,
                "rank": next(rank for rank, own in enumerate(held) if stage.index in own),
                "layers": [stage.layers.start, stage.layers.stop],
                "params": stage.params(model),
                "cost_share": cost / sum(costs),
            }
            for stage, cost in zip(stages, costs, strict=True)
        ],
        "idle": {
            "formula": formula,
            "ideal": share,
            "equal_stages": idle_shares(simulate(orders_of(run), stage_times(times, [1.0] * len(costs)))),
            "this_split": idle_shares(spans),
            "measured": idle_shares(real) if real else None,
        },
    }
    return facts, spans


def print_stages(facts: dict[str, Any]) -> None:
    count = len(facts["stages"])
    rows = [
        [
            stage["stage"],
            stage["rank"],
            f"{stage['layers'][0]}–{stage['layers'][1] - 1}",
            {0: "embedding", count - 1: "head"}.get(stage["stage"], ""),
            f"{stage['params']:,}",
            f"{stage['cost_share']:.1%}",
        ]
        for stage in facts["stages"]
    ]
    print_table("Stages", ["stage", "rank", "layers", "and", "parameters", "share of cost"], rows)


def print_timeline(facts: dict[str, Any], simulated: list[Span], real: list[Span] | None) -> None:
    from ..report.plots import KINDS

    idle = facts["idle"]
    title = f"{facts['schedule']}, {facts['micro_batches']} micro-batches over {facts['ranks']} ranks"
    typer.echo(f"{title}, simulated (messages take no time)")
    typer.echo(timeline_text(simulated, 1 / 3))
    if real:
        typer.echo(f"\n{title}, measured")
        typer.echo(timeline_text(real, 0))
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in simulated)]
    typer.echo(
        f"{', '.join(f'{kind} {KINDS[kind]}' for kind in kinds)}, with the micro-batch; · idle; "
        "small letters: every second stage of a rank"
    )
    columns = ["rank", "equal stages", "this split", *(["measured"] if real else [])]
    shares = [idle["equal_stages"], idle["this_split"], *([idle["measured"]] if real else [])]
    rows = [[rank, *(f"{share:.1%}" for share in row)] for rank, row in enumerate(zip(*shares, strict=True))]
    print_table("Idle share of a step", columns, rows)
    typer.echo(f"formula for equal stages: {idle['formula']} = {idle['ideal']:.1%}")


def timeline_text(spans: list[Span], unit: float) -> str:
    """Drawn at this many units of time a column, or coarser where the terminal is too narrow."""
    from ..report.plots import draw_timeline_text

    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    room = max(40, shutil.get_terminal_size((120, 24)).columns - 8)
    return draw_timeline_text(spans, max(unit, whole / room))
