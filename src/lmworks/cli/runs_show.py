"""`lmworks runs show`: one run, its attempts, where its time went, and how often it should save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..diagnose.checkpoint_interval import Interval
    from ..diagnose.goodput import TimeBreakdown
    from ..record.run_summary import Summary

ROUTINE = ("start", "resume", "save", "copy", "eval", "finish")  # events that are told by the tables above theirs
SHOWN = 20  # of the others, the newest


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its name below runs/.")],
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between stops (otherwise: as observed).")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw its time into plots/goodput.png.")] = False,
    json: Json = False,
) -> None:
    """Show one run: attempts, goodput, and time lost by cause.

    \b
    Examples:
      lmworks runs show runs/tiny
      lmworks runs show runs/tiny --mtbf 3 --plot
      lmworks runs show runs/tiny --json
    """
    from ..diagnose.checkpoint_interval import interval
    from ..diagnose.goodput import time_breakdown
    from ..record.metrics import read_stats
    from ..record.run_summary import locate, summarize
    from ..report.plots import draw_goodput

    folder = locate(run)
    summary, found = summarize(folder), time_breakdown(folder)
    advice = interval(folder, summary, found, mtbf)
    unusual = [event for event in folder.events() if event["kind"] not in ROUTINE]
    layers = read_stats(folder.stats_path)[-1:]
    drawn = draw_goodput(folder, found) if plot else None
    if json:
        attempts = [vars(attempt) | seconds_of(attempt.begin, attempt.end) for attempt in found.attempts]
        result: dict[str, Any] = {
            "run": summary.to_dict(),
            "time": found.to_dict(),
            "attempts": attempts,
            "events": unusual,
        }
        result |= {"interval": advice.to_dict() if advice else None, "layers": layers[0] if layers else None}
        print_json(result | ({"plot": str(drawn)} if drawn else {}))
        return
    print_run(summary)
    print_attempts(found)
    print_time(summary, found)
    print_interval(advice, found, mtbf is not None)
    print_events(unusual, found)
    print_layers(layers)
    if drawn:
        typer.echo(f"time: {drawn}")


def seconds_of(begin: int, end: int) -> dict[str, float]:
    return {"begin": begin / 1e6, "end": end / 1e6}


def print_run(summary: Summary) -> None:
    from ..record.formatting import short

    losses = {"loss": summary.loss, "val loss": summary.val_loss}
    said = [f"{name} {value:.4f}" for name, value in losses.items() if value is not None]
    if summary.tokens_per_s:
        said.append(f"{short(summary.tokens_per_s)} tokens/s in a median step")
    typer.echo(f"{summary.name}: {summary.status}, {summary.steps:,} of {summary.total_steps:,} steps")
    if said:
        typer.echo(", ".join(said))


def print_attempts(found: TimeBreakdown) -> None:
    from ..record.formatting import clock, duration

    rows = [
        [
            attempt.number,
            clock(attempt.begin / 1e6),
            duration((attempt.end - attempt.begin) / 1e6),
            f"{attempt.from_step:,} to {attempt.to_step:,}",
            attempt.ended + (f": {attempt.error}" if attempt.error else ""),
        ]
        for attempt in found.attempts
    ]
    if rows:
        print_table("Attempts", ["attempt", "began at", "lasted", "steps", "ended"], rows)


def print_time(summary: Summary, found: TimeBreakdown) -> None:
    from ..diagnose.goodput import CAUSES
    from ..record.formatting import duration, short

    if found.ettr is None or found.goodput is None:
        typer.echo("nothing is recorded yet")
        return
    rows = [
        [cause, duration(seconds), f"{seconds / found.wall_s:.1%}", CAUSES[cause]]
        for cause, seconds in found.seconds.items()
        if seconds
    ]
    rows.append(["all", duration(found.wall_s), "100.0%", "from the first record to the last"])
    print_table("Time", ["cause", "time", "share", ""], rows)
    typer.echo(f"ETTR {found.ettr:.1%}: useful time and evaluation, of all time but pauses")
    speed = f" ({short(summary.tokens_per_s)} in a median step)" if summary.tokens_per_s else ""
    typer.echo(f"goodput {short(found.goodput)} tokens/s{speed}")


def print_interval(advice: Interval | None, found: TimeBreakdown, given: bool) -> None:
    from ..record.formatting import duration

    if advice is None:
        missing = "a save" if given or found.failures else "a stop; give one with --mtbf HOURS"
        typer.echo(f"\nHow often to save is not known without {missing}.")
        return
    durations = {key: duration(value) for key, value in vars(advice.recovery).items()}
    whose = f"observed, {found.failures} so far" if advice.observed else "given"
    columns = {"in use": (advice.steps, advice.ettr), "best": (advice.best_steps, advice.best_ettr)}
    rows = [
        [
            name,
            steps or "never",
            duration(steps * advice.step_s) if steps else "-",
            "-" if ettr is None else f"{ettr:.2%}",
        ]
        for name, (steps, ettr) in columns.items()
    ]
    print_table("Saves", ["interval", "steps", "training between", "ETTR to expect"], rows)
    written = f" and counts {durations['write_s']} later" if advice.recovery.write_s else ""
    typer.echo(
        f"A save holds training up for {durations['stall_s']}{written}; a restart takes {durations['restart_s']};"
    )
    typer.echo(f"a stop comes every {durations['mtbf_s']} ({whose}).")


def print_events(unusual: Sequence[Mapping[str, Any]], found: TimeBreakdown) -> None:
    from datetime import datetime

    from ..record.event_text import describe_event
    from ..record.formatting import clock

    if not unusual:
        return
    began = datetime.fromisoformat(found.began)
    rows = [
        [
            clock((datetime.fromisoformat(event["time"]) - began).total_seconds()),
            event["step"],
            event["kind"],
            describe_event(event),
        ]
        for event in unusual[-SHOWN:]
    ]
    more = f", the newest {SHOWN} of {len(unusual)}" if len(unusual) > SHOWN else ""
    print_table(f"Events{more}", ["at", "step", "event", ""], rows)


def print_layers(newest: Sequence[Mapping[str, Any]]) -> None:
    """The statistics of `health.stats_every`, at the last step that has any."""
    for line in newest:
        parts: Mapping[str, Mapping[str, float]] = line["parts"]
        columns = list(dict.fromkeys(key for part in parts.values() for key in part))
        rows = [
            [name, *(f"{part[key]:.3g}" if key in part else "-" for key in columns)] for name, part in parts.items()
        ]
        print_table(f"Layers at step {line['step']:,}", ["part", *columns], rows)
