"""`lmworks profile compare`: two recordings side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.progress import activity
from ..record.formatting import duration
from ..spec.errors import NoSuchData
from .output import Json, print_json, print_table

Recording = Annotated[Path, typer.Argument(help="A run folder, a folder of traces, or a trace.")]
LISTED = 10  # ops of the table


def compare(before: Recording, after: Recording, json: Json = False) -> None:
    """Show what became faster or slower between two recordings.

    Times are of one step of one rank. Of a run that was recorded several times, its newest traces are read.

    \b
    Examples:
      lmworks profile compare runs/tiny-profile runs/tiny-profile-2
      lmworks profile compare before.json.gz after.json.gz --json
    """
    from ..trace import read_traces
    from ..trace.compare import compare as compared

    with activity() as doing:
        facts = compared(*(read_traces(trace_files(place), doing) for place in (before, after)))
    if json:
        print_json({"before": str(before), "after": str(after), **facts})
    else:
        print_comparison(facts)


def trace_files(place: Path) -> list[Path]:
    """The traces of one recording, by name."""
    if not place.is_dir():
        return [place]
    from ..trace.files import TRACES, newest_traces

    folder = place / "traces" if (place / "traces").is_dir() else place
    found = newest_traces(folder)
    if not found:
        raise NoSuchData(f"{folder} has no traces ({', '.join(TRACES)}); `lmworks profile train` records some")
    return found


def print_comparison(facts: dict[str, Any]) -> None:
    step, ranges = facts["step"], (facts["before_range_s"], facts["after_range_s"])
    between = " and ".join(f"{duration(low)} to {duration(high)}" for low, high in ranges)
    sure = "" if facts["apart"] else f"; the steps of both overlap ({between}): it may be chance"
    ratio = "" if facts["speedup"] is None else f", {facts['speedup']:.3g}× as fast"
    typer.echo(f"a step takes {duration(step['after_s'])} instead of {duration(step['before_s'])}{ratio}{sure}")
    columns = ["", "before", "after", "change"]
    idle = [{**one, "name": f"idle: {one['name']}"} for one in facts["idle_by_cause"]]
    parts = [row for row in [*facts["parts"], *idle] if row["before_s"] or row["after_s"]]
    print_table("Milliseconds a step", columns, [cells(row) for row in parts])
    if facts["collectives"]:
        print_table("Collectives, as far as they are not hidden", columns, [cells(row) for row in facts["collectives"]])
    print_table("Ops, by how much they changed", columns, [cells(row) for row in facts["ops"][:LISTED]])


def cells(row: dict[str, Any]) -> list[str]:
    from ..trace.hotspots import short_name

    before, after, change = (1e3 * row[key] for key in ("before_s", "after_s", "change_s"))
    return [short_name(row["name"]), f"{before:.2f}", f"{after:.2f}", f"{change:+.2f}"]
