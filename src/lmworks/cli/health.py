"""`lmworks runs health`: what went wrong in the numbers of a run, and where to look next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..record import RunFolder
    from ..record.triage import Finding


def health(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    stats: Annotated[bool, typer.Option("--stats", help="Also show the newest statistics of every block.")] = False,
    json: Json = False,
) -> None:
    """Explain spikes, NaNs and corruption: data, numbers or machine.

    \b
    Examples:
      lmworks runs health runs/tiny
      lmworks runs health runs/tiny --stats
      lmworks runs health runs/tiny --json
    """
    from ..record import RunFolder, read_metrics
    from ..record.stats import read_stats
    from ..record.triage import findings

    folder = RunFolder.open(run)
    events = folder.events()
    found = findings(events)
    done = [event for event in events if event["kind"] in ("skip", "rewind", "lower_lr")]
    overflows = [event for event in events if event["kind"] == "overflow"]
    lines = read_stats(folder.stats_path)
    if json:
        table = {"run": str(run), "findings": [dataclasses.asdict(one) for one in found], "actions": done}
        print_json({**table, "overflows": len(overflows), "stats": lines[-1] if lines and stats else None})
        return
    steps = len(read_metrics(folder.metrics_path))
    typer.echo(f"{run}: {counted(steps, 'step')} recorded, {counted(len(found), 'finding')}")
    if overflows:
        scales = f"{overflows[0]['loss_scale']:g} to {overflows[-1]['next_scale']:g}"
        typer.echo(f"fp16's loss scale went from {scales}; {counted(len(overflows), 'step')} left out")
    show(found, done, folder)
    if stats:
        show_stats(lines)


def show(found: list[Finding], done: list[dict[str, Any]], folder: RunFolder) -> None:
    """A finding takes two lines, which fit into a terminal where a table of sentences would not."""
    from ..record.sentences import describe_event

    for one in found:
        where = "" if one.cursor is None else f" (cursor {one.cursor})"
        typer.echo(f"step {one.step}{where}: {one.what}")
        typer.echo(f"    {one.cause}: {one.why}; done: {one.action}")
    for event in done:
        typer.echo(f"step {event['step']}: {describe_event(event)}")
    cursors = {f.cursor for f in found if f.cause in ("data", "unclear") and f.cursor is not None}
    for cursor in sorted(cursors)[:3]:
        typer.echo(f"see its data: lmworks data window {folder.path} --cursor {cursor}")


def counted(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def show_stats(lines: list[dict[str, Any]]) -> None:
    if not lines:
        typer.echo("no statistics: health.stats_every = 100 writes them every 100 steps")
        return
    keys = ["act_mean_abs", "act_rms", "act_max", "grad_norm", "param_norm", "update_ratio"]
    rows = [
        [name, *(f"{part[key]:.3g}" if key in part else "-" for key in keys)]
        for name, part in lines[-1]["parts"].items()
    ]
    print_table(f"Statistics of step {lines[-1]['step']}", ["part", *keys], rows)
