"""`lmworks plan hardware`: the catalogue of accelerators, and what this machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import complete
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..plan.devices.machine import Machine
    from ..spec import Gpu


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One accelerator, with its sources.", autocompletion=complete.gpus),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure this machine anew, and keep the result.")] = False,
    json: Json = False,
) -> None:
    """List accelerators and their sources, or measure this machine.

    \b
    Examples:
      lmworks plan hardware
      lmworks plan hardware H100-SXM-80GB
      lmworks plan hardware --probe
    """
    from ..spec import Cluster, SpecError, catalogue
    from ..spec.hardware import find_gpu_name

    if probe:
        if name:
            raise SpecError("--probe measures the machine at hand; it takes no name")
        from ..bench.probe import this_machine

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
    from ..record.figures import binary_bytes, duration, short

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
    """That others used it while it was measured, and what that means for its figures; nothing where it was quiet."""
    if machine.quiet:
        return
    typer.secho(
        f"this machine was busy while it was measured: runs took {machine.noise:.1f} × what they take alone. Figures "
        "are of the machine alone, ranges reach to one that stays as busy; "
        "lmworks plan hardware --probe measures it again",
        fg="yellow",
    )
