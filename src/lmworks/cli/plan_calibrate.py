"""`lmworks plan calibrate`: measure the machine at hand, so that later plans rest on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..plan.devices.curves import Curve
    from ..plan.devices.profile import Profile


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The profile to write.")] = Path("profile.toml"),
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.05, max=600, help="About how long (CPU 1, CUDA 1.5).")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Ranks that exchange messages: by default one a GPU or core.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: fewer sizes.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine; later plans use the profile.

    Matrix products, attention, passes over memory, the optimizer, launches, and collectives between ranks of this
    machine. Leave it alone meanwhile: what else runs here is measured too.

    \b
    Examples:
      lmworks plan calibrate
      lmworks plan calibrate --out profiles/lab.toml --minutes 5
      lmworks plan calibrate --device cpu --ranks 2 --quick
      lmworks plan cpu-10m cluster.profile=profile.toml
    """
    from ..bench.calibrate import calibrate, check_output_path, save
    from ..bench.probe import local_device
    from ..data.progress import console_progress
    from ..spec import Cluster

    check_output_path(out)
    place = local_device(Cluster(device=device))
    with console_progress() as progress:
        profile = calibrate(place, minutes and 60 * minutes, ranks, quick, progress)
    save(profile, out)
    if json:
        print_json({"profile": str(out), **profile.to_dict()})
        return
    print_profile(profile)
    typer.echo(f"written to {out}; plan with it: lmworks plan SPEC cluster.profile={out}")


def print_profile(profile: Profile) -> None:
    from .hardware import print_machine

    print_machine(profile.machine)
    if profile.curve:
        print_links(profile.curve)


def print_links(curve: Curve) -> None:
    from ..plan.devices.curves import wire_share
    from ..record.figures import binary_bytes, duration, short

    rows = [
        [kind, ranks, binary_bytes(size), duration(s), f"{short(size * float(wire_share(kind, ranks)) / s)}B/s"]
        for kind, by_ranks in curve.seconds_at.items()
        for ranks, seconds in by_ranks.items()
        for size, s in zip(curve.sizes, seconds, strict=True)
    ]
    print_table("Collectives between ranks of this machine", ["collective", "ranks", "message", "time", "sent"], rows)
