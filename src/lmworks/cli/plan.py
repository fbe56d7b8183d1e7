"""`lmworks plan`: what a run will take, before it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .groups import DefaultCommandGroup
from .options import print_host_memory
from .output import Json, Overrides, Spec, print_json, print_table
from .plan_lookup import hardware, mesh, models, pipeline, print_busy
from .plan_memory import memory
from .plan_reliability import reliability
from .plan_search import search
from .plan_serve import serve
from .plan_validate import calibrate, validate
from .plan_validate import predict as predict_table

if TYPE_CHECKING:
    from ..plan.devices.machine import Machine
    from ..plan.exact.calls import Collective
    from ..plan.predict import Prediction
    from ..spec import Cluster, RunSpec


class SpecOrCommand(DefaultCommandGroup):
    """`lmworks plan SPEC` is `lmworks plan run SPEC`."""

    default_command = "run"

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        spec = self.commands["run"].params[0]
        return [*super().shell_complete(ctx, incomplete), *spec.shell_complete(ctx, incomplete)]


app = typer.Typer(
    cls=SpecOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Predict memory, time and cost of a run; find the best layout.",
)
PREDICT, LOOK_UP, CHECK = "Predict", "Look up and draw", "Calibrate and validate"


@app.command("run", rich_help_panel=PREDICT)
def run(
    spec: Spec,
    overrides: Overrides = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Do not measure this machine: no step time.")] = False,
    json: Json = False,
) -> None:
    """Predict the memory and the step time of a run on one device.

    The time is for this machine, measured in a few seconds the first time, or for the accelerator that cluster.gpu
    names, from products measured on it or its kin.

    \b
    Examples:
      lmworks plan configs/tiny.toml
      lmworks plan cpu-10m data.seq=256 data.micro_batch=8
      lmworks plan llama3-1b cluster.gpu=H200-SXM-141GB data.seq=4096 data.micro_batch=4 precision.dtype=bf16
      lmworks plan gpt2-small parallel.recompute=full --no-probe --json
      lmworks plan configs/reference/70b-256-h100.toml
    """
    from ..plan.memory.host import available_bytes, ranks_on_host
    from ..plan.memory.host_fit import refusal
    from ..plan.memory.host_need import machine_need
    from ..plan.ops import device_of
    from ..plan.predict import predict
    from ..spec import load_run

    job = load_run(spec, overrides or ())
    machine = find_machine(job.cluster, no_probe)
    prediction, ranks = predict(job, machine), ranks_on_host(job)
    shared = machine_need(job, range(ranks), machine.device if machine else device_of(job))
    there = available_bytes() if is_here(job.cluster) else None
    refused = refusal(job, shared, ranks, there)
    if json:
        calls = [vars(call) for call in sent(job)]
        facts = {**prediction.to_dict(), "host_bytes_per_machine": shared.total}
        facts |= {"host_per_machine_parts": shared.to_dict(), "host_available_bytes": there}
        facts["host_fits"] = None if there is None else not refused
        print_json({"name": job.name, **facts, "fits": fits(prediction), "collectives": calls})
        return
    typer.echo(f"{job.name}: {job.model.params:,} parameters, {job.tokens_per_step:,} tokens a step")
    print_memory(prediction)
    print_host_memory(prediction.memory.host, shared.total, ranks, shared, there)
    if refused:
        typer.echo(f"it would be refused here: {refused}")
    print_calls(job)
    print_time(prediction, job)


app.command(rich_help_panel=PREDICT)(memory)
app.command(rich_help_panel=PREDICT)(search)
app.command(rich_help_panel=PREDICT)(serve)
app.command(rich_help_panel=PREDICT)(reliability)
app.command("predict", rich_help_panel=PREDICT)(predict_table)
app.command(rich_help_panel=LOOK_UP)(models)
app.command(rich_help_panel=LOOK_UP)(hardware)
app.command(rich_help_panel=LOOK_UP)(mesh)
app.command(rich_help_panel=LOOK_UP)(pipeline)
app.command(rich_help_panel=CHECK)(calibrate)
app.command(rich_help_panel=CHECK)(validate)


def is_here(cluster: Cluster) -> bool:
    """Whether it is this machine that a run is planned for."""
    return not cluster.profile and cluster.accelerator is None


def find_machine(cluster: Cluster, no_probe: bool) -> Machine | None:
    from ..plan.devices.machine import Machine
    from ..plan.devices.profile import profile_of

    if cluster.profile:
        return profile_of(cluster).machine
    if cluster.accelerator:
        return Machine.of(cluster.accelerator)
    if no_probe:
        return None
    from ..bench.calibrate import cached_machine, this_machine
    from ..data.progress import console_progress

    if machine := cached_machine(cluster):
        return machine
    with console_progress() as progress:
        return this_machine(cluster, progress=progress)


def fits(prediction: Prediction) -> bool | None:
    """With what the allocator takes on top; None where the machine, or its memory, is unknown."""
    from ..plan.memory.reserve import reserved, safe_bytes_of

    machine = prediction.machine
    if machine is None or not machine.memory_bytes:
        return None
    if machine.device == "cpu":
        return prediction.memory.total <= machine.memory_bytes
    return float(reserved(prediction.memory.total)) <= safe_bytes_of(machine.memory_bytes)


def sent(job: RunSpec) -> list[Collective]:
    from ..plan.exact.collectives import collectives
    from ..spec import SpecError

    try:
        return collectives(job)
    except SpecError:  # DeepSpeed's are not known
        return []


def print_memory(prediction: Prediction) -> None:
    from ..record.formatting import binary_bytes

    sheet, machine = prediction.memory, prediction.machine
    rows = [[row.name, binary_bytes(row.bytes), row.how] for row in sheet.rows]
    print_table(f"Memory at the highest moment of a step ({sheet.moment})", ["what", "bytes", "how"], rows)
    typer.echo(f"peak {both(sheet.total)}")
    for note in sheet.notes:
        typer.echo(f"note: {note}")
    answer = fits(prediction)
    if machine and answer is not None:
        share = sheet.total / machine.memory_bytes
        verdict = "fits in" if answer else "does NOT fit in"
        besides = ", allocator and driver included" if machine.device == "cuda" else ""
        typer.echo(f"{verdict} the {both(machine.memory_bytes)} of {machine.name}: {share:.1%} of it{besides}")


def print_calls(job: RunSpec) -> None:
    from ..record.formatting import binary_bytes

    rows = [
        [call.what, call.kind, f"{call.ranks} ({call.group})", call.count, binary_bytes(call.bytes), call.when]
        for call in sent(job)
        if call.kind != "recv"
    ]
    if rows:
        print_table(
            "What rank 0 sends in a step", ["what", "how", "among", "calls", "bytes", "when"], rows, ("when", "how")
        )


def print_time(prediction: Prediction, job: RunSpec) -> None:
    from ..record.formatting import duration, short

    time, machine = prediction.time, prediction.machine
    if machine is None:
        typer.echo("\nstep time: not predicted; leave out --no-probe to measure this machine")
        return
    if time is None:
        unknown = f"the rate of {machine.name} in {job.precision.dtype} is not known"
        if machine.covers(job.precision.dtype):
            unknown = "several ranks share this machine; name the accelerator of a cluster with cluster.gpu"
        typer.echo(f"\nstep time: not predicted; {unknown}")
        return
    rows = [
        [part, duration(seconds), f"{seconds / time.total:.0%}", time.tags[part]]
        for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1])
        if seconds
    ]
    low, high = time.interval
    span = "" if machine.quiet else f", busy while it was measured: {duration(low)} to {duration(high)}"
    print_table(f"Time of one step on {machine.name}{span}", ["part", "time", "share", "rests on"], rows)
    flops = prediction.flops.model / time.total
    typer.echo(
        f"step {duration(time.total)}, {short(time.tokens_per_s)} tokens/s, {short(flops)}FLOP/s of the model's own"
        + shares(prediction, job)
    )
    typer.echo(f"nine in ten such predictions lie within {duration(low)} to {duration(high)}")
    for note in time.notes:
        typer.echo(f"note: {note}")
    print_busy(machine)
    if machine.tag != "measured":
        typer.echo(f"{machine.name} was not at hand: see lmworks plan validate for how good such predictions are")


def shares(prediction: Prediction, job: RunSpec) -> str:
    """MFU and HFU, where the peak of the accelerator is known."""
    gpu, time = job.cluster.accelerator, prediction.time
    peak = gpu.peak_flops(job.precision.dtype) if gpu else None
    if not peak or time is None:
        return ""
    whole = peak * job.parallel.world * time.total
    return f", {prediction.flops.model / whole:.1%} MFU, {prediction.flops.hardware / whole:.1%} HFU"


def both(count: int) -> str:
    """Bytes in both units, as the two are often mistaken for each other."""
    from ..record.formatting import binary_bytes

    return f"{binary_bytes(count)} ({count / 1e9:.3g} GB)"
