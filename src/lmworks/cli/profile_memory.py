"""`lmworks profile memory`: what holds the memory of a GPU, and how fragmented it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import binary_bytes, duration
from .output import Json, print_json, print_table

LISTED = 10  # holders of a table


def memory(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Snapshots of torch.cuda.memory._dump_snapshot (.pickle).")
    ],
    json: Json = False,
) -> None:
    """Read memory snapshots: what holds it, how fragmented it is.

    \b
    Examples:
      lmworks profile memory runs/tiny/traces/rank0-steps-4-6.pickle
      lmworks profile memory snapshot.pickle --json
    """
    from ..trace.memory import read_snapshot

    found: list[dict[str, Any]] = []
    with activity() as doing:
        for number, file in enumerate(files):
            doing(f"reading {file.name}", number, len(files))
            found.append({"file": str(file), "devices": [one.to_dict() for one in read_snapshot(file)]})
    if json:
        print_json({"snapshots": found})
        return
    for one in found:
        print_snapshot(one["file"], one["devices"])


def print_snapshot(name: str, devices: Sequence[dict[str, Any]]) -> None:
    if not devices:
        typer.echo(f"{name}: no memory of a GPU")
    for one in devices:
        typer.echo(
            f"{name}, GPU {one['device']}: {binary_bytes(one['allocated_bytes'])} allocated of "
            f"{binary_bytes(one['reserved_bytes'])} reserved; free in it {binary_bytes(one['free_bytes'])}, "
            f"the largest block {binary_bytes(one['largest_free_bytes'])} (fragmentation {one['fragmentation']:.0%})"
        )
        more = f", {one['out_of_memory']} requests failed" if one["out_of_memory"] else ""
        typer.echo(
            f"    peak {binary_bytes(one['peak_bytes'])} after {duration(one['peak_s'])}; "
            f"{one['segment_allocs']} segments taken from the device and {one['segment_frees']} returned{more}"
        )
        rows = [
            [held["site"], binary_bytes(held["bytes"]), f"{held['bytes'] / one['peak_bytes']:.0%}", held["blocks"]]
            for held in one["holders"][:LISTED]
        ]
        if rows:
            print_table("What held the peak", ["allocated by", "bytes", "share", "blocks"], rows)


def print_memory(facts: dict[str, Any]) -> None:
    """Of the traces of a job."""
    for rank in facts["memory"]:
        for one in rank["devices"]:
            where = "host" if one["device"] < 0 else f"GPU {one['device']}"
            since = "" if one["peak_reserved_bytes"] else ", allocations since the recording began"
            typer.echo(
                f"rank {rank['rank']}, {where}: memory peaks at {binary_bytes(one['peak_bytes'])}{since}; "
                f"{one['allocations']:,} allocations"
            )
        if rank["snapshot"]:
            print_snapshot(f"rank {rank['rank']}", rank["snapshot"])
