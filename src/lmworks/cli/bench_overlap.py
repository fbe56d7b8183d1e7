"""`lmworks bench overlap`: settings of data parallelism against step time and exposed communication."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..data.progress import console_progress, silent
from ..record.formatting import binary_bytes, duration
from ..spec import load_run
from .options import Force, OnDevice, Overrides, Spec, device_options, on_device
from .output import Json, print_json, print_table
from .ranks import needs_ranks, start_ranks

if TYPE_CHECKING:
    from ..bench.overlap import OverlapStudy, Setting, Spread


def overlap(
    spec: Spec,
    overrides: Overrides = None,
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=0, show_default=False, help="Data-parallel ranks (by default the spec's, or 2)."),
    ] = 0,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Timed steps of each setting.")] = 10,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw steps by setting.")] = None,
    device: OnDevice = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Vary bucket size, prefetch, resharding, reduction order.

    Each setting is timed in turns with the spec as it is and with passes that send nothing, over gloo on CPUs, NCCL on
    GPUs. Exposed and hidden communication come from a trace. Ends in overrides, with their gain and its spread.

    \b
    Examples:
      lmworks bench overlap cpu-10m data.seq=128 --steps 8
      lmworks bench overlap configs/tiny.toml parallel.dp=2 parallel.strategy=fsdp2 --plot overlap.png
      lmworks bench overlap llama3-1b parallel.dp=8 parallel.strategy=fsdp2 precision.dtype=bf16 --json
    """
    if plot:
        from ..report.plots import check_plot_path

        check_plot_path(plot, "--plot")
    changes = [*(overrides or ()), *on_device(device)]
    loaded = load_run(spec, changes)
    if ranks or loaded.parallel.dp == 1:
        changes.append(f"parallel.dp={ranks or 2}")
        loaded = load_run(spec, changes)
    from ..bench.overlap import check_study, study

    check_study(loaded)
    if needs_ranks(loaded):
        options = ["--steps", str(steps), *(["--plot", str(plot)] if plot else []), *(["--json"] if json else [])]
        start_ranks(loaded, ["bench", "overlap", spec, *changes, *options, *device_options("", force)], force)
        return
    from ..parallel.world import distributed_shutdown, is_rank_zero

    with distributed_shutdown(), console_progress() as progress:
        found = study(loaded, steps, progress if is_rank_zero() else silent)
    if found is None:
        return
    if plot:
        from ..report.overlap_plot import draw_overlap

        draw_overlap(found.to_dict(), plot)
    if json:
        print_json(found.to_dict())
    else:
        print_study(found)
        if plot:
            typer.echo(f"drawn: {plot}")


def print_study(found: OverlapStudy) -> None:
    base = found.baseline
    micro = f"{found.spec.accumulation} micro-batch{'es' if found.spec.accumulation > 1 else ''} a rank"
    title = (
        f"{found.spec.name}, {found.spec.model.params:,} parameters, {found.spec.parallel.strategy} over {found.ranks} "
        f"ranks ({found.backend}, {found.device}), {micro}: passes without communication {duration(found.compute_s)}"
    )
    shown = [base, *found.settings, *([found.together] if found.together and len(found.together.overrides) > 1 else [])]
    columns = ["setting", "step", "gain", "quartiles", "communication costs", "exposed", "hidden", "planned memory"]
    print_table(title, columns, [cells(one, base) for one in shown], drop=("planned memory", "quartiles", "hidden"))
    for key, reason in found.not_measured.items():
        typer.echo(f"parallel.{key}: {reason}")
    if not found.settings:
        typer.echo("recommendation: keep the spec: there was nothing to vary, for the reasons above")
        return
    best = found.recommended
    if best is None:
        typer.echo("recommendation: keep the spec: no setting gains more than its spread")
        return
    more = best.planned_bytes - base.planned_bytes
    typer.echo(
        f"recommendation: {best.name}: {best.gain.median:.1%} of a step ({quartiles(best.gain)}), planned memory "
        f"{'+' if more >= 0 else '−'}{binary_bytes(abs(more))} a rank"
    )


def cells(one: Setting, base: Setting) -> list[str]:
    gain = ["-", "-"] if one is base else [f"{one.gain.median:+.1%}", quartiles(one.gain)]
    times = [signed(one.comm_cost_s.median), duration(one.exposed_s), duration(one.hidden_s)]
    return [one.name, duration(one.step_s), *gain, *times, binary_bytes(one.planned_bytes)]


def signed(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"−{duration(-seconds)}"


def quartiles(spread: Spread) -> str:
    return f"{spread.low:+.1%} to {spread.high:+.1%}"
