"""`lmworks plan pipeline`: the stages of a pipeline, the timeline of its schedule, and how long ranks idle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, Overrides, Spec, print_json, print_table
from .ranks import needs_ranks, start_ranks

if TYPE_CHECKING:
    from ..plan.pipelines.schedule import Span
    from ..spec import RunSpec


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
    with --measure the ranks are started, and the timeline and idle time of a real step stand beside it.

    \b
    Examples:
      lmworks plan pipeline llama3-1b parallel.pp=4 data.global_batch=64
      lmworks plan pipeline cpu-10m parallel.pp=2 parallel.schedule=zbv data.global_batch=32 --png zbv.png
      lmworks plan pipeline tiny parallel.pp=2 data.global_batch=32 --measure
      lmworks plan pipeline gpt2-small parallel.pp=4 parallel.schedule=interleaved data.global_batch=64 --json
    """
    from ..spec import SpecError, load_run

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
    from ..report.pipeline_timeline import draw_png

    facts, simulated = describe(run, real)
    if png:
        draw_png(real or simulated, png, "seconds" if real else "forward passes of an average stage")
    if json:
        print_json(facts)
        return
    print_stages(facts)
    print_timeline(facts, simulated, real)
    if png:
        typer.echo(f"drawn: {png}")


def measured(run: RunSpec) -> list[Span] | None:
    """What the ranks of the first rank's pipeline did in a step; None on the other ranks."""
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
    from ..plan.pipelines.orders import actions, stages_of
    from ..plan.pipelines.schedule import durations, idle_shares, simulate, stage_times
    from ..plan.pipelines.stages import split_layers

    layout, model, seq = run.parallel, run.model, run.data.seq
    shape = (layout.schedule, layout.pp, layout.virtual_stages, run.accumulation)
    stages = split_layers(model, seq, layout.pp * layout.virtual_stages)
    costs = [stage.cost(model, seq) for stage in stages]
    mean = sum(costs) / len(costs)
    times, orders = durations(layout.recompute), actions(*shape)
    simulated = simulate(orders, stage_times(times, [cost / mean for cost in costs]))
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
            "equal_stages": idle_shares(simulate(orders, stage_times(times, [1.0] * len(costs)))),
            "this_split": idle_shares(simulated),
            "measured": idle_shares(real) if real else None,
        },
    }
    return facts, simulated


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
    from ..report.pipeline_timeline import KINDS

    idle = facts["idle"]
    title = f"{facts['schedule']}, {facts['micro_batches']} micro-batches over {facts['ranks']} ranks"
    typer.echo(f"{title}, as worked out (messages take no time)")
    typer.echo(fitted(simulated, 1 / 3))
    if real:
        typer.echo(f"\n{title}, as measured")
        typer.echo(fitted(real, 0))
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


def fitted(spans: list[Span], unit: float) -> str:
    """Drawn at this many units of time a column, or coarser where the terminal is too narrow."""
    from ..report.pipeline_timeline import draw_text

    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    room = max(40, shutil.get_terminal_size((120, 24)).columns - 8)
    return draw_text(spans, max(unit, whole / room))
