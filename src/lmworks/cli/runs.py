"""`lmworks runs` and `lmworks report`: list, compare and show runs; bad steps (`health`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record import RunFolder, read_metrics
from ..record.formatting import clock, duration, short
from ..record.metrics import read_stats
from ..spec import SpecError
from .groups import DefaultCommandGroup
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..diagnose.checkpoint_interval import Interval
    from ..diagnose.goodput import TimeBreakdown
    from ..record.event_text import Finding
    from ..record.run_summary import Summary
    from ..report.predicted_vs_measured import Row


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its name below runs/.")]
RunOrSweep = Annotated[Path, typer.Argument(metavar="RUN", help="A run, or its name below runs/; or a sweep.")]


class FoldersOrCommand(DefaultCommandGroup):
    """`lmworks runs DIR…` is `lmworks runs ls DIR…`."""

    default_command = "ls"


app = typer.Typer(
    cls=FoldersOrCommand,
    rich_markup_mode=None,
    help="List and show runs; diagnose bad steps.",
)


@app.command("ls")
def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Runs, or folders with runs below (by default runs/ and sweeps/)."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show where the given runs differ, side by side.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw their loss curves into this file.")] = None,
    json: Json = False,
) -> None:
    """List runs and sweeps, the newest first, or compare runs.

    `lmworks runs DIR` is `lmworks runs ls DIR`; a folder named like a command is written `./health`.

    \b
    Examples:
      lmworks runs
      lmworks runs sweeps/lr --json
      lmworks runs --compare runs/tiny runs/tiny-2 --plot loss.png
    """
    from ..record.run_summary import compare_runs, find_runs, list_runs, locate
    from ..report.plots import check_plot_path, overlay_losses
    from ..sweep.listing import find_sweeps, list_sweeps
    from .runs_sweeps import print_sweeps

    if plot:
        check_plot_path(plot, "--plot")
    if compare:
        if len(places or ()) < 2:
            raise SpecError("--compare needs at least two runs, e.g. `lmworks runs --compare runs/a runs/b`")
        folders = [locate(place) for place in places or ()]
        compared = compare_runs(folders)
    else:
        folders = find_runs(places or ())
        listed, sweeps = list_runs(folders), list_sweeps(find_sweeps(places or ()))
    if plot:
        overlay_losses(folders, plot)
    if json:
        print_json(compared if compare else [*listed, *sweeps])
    elif compare:
        print_comparison(compared)
    else:
        if listed or not sweeps:
            print_list(listed)
        print_sweeps(sweeps)
    if plot and not json:
        typer.echo(f"loss curves: {plot}")


def print_list(listed: list[dict[str, Any]]) -> None:
    if not listed:
        typer.echo("no runs yet; start one with `lmworks train configs/tiny.toml`")
        return
    columns = ["run", "params", "steps", "status", "loss", "val", "tok/s", "date"]
    readable = [row for row in listed if row["status"] != "unreadable"]
    rows = [[row["path"], *run_columns(row).values()] for row in readable]
    print_table("Runs", columns, rows, drop=("params", "date", "tok/s", "val"))
    for row in listed:
        if row["status"] == "unreadable":
            typer.echo(f"{row['path']}: {row['error']}", err=True)


def print_comparison(compared: dict[str, Any]) -> None:
    names = [row["path"] for row in compared["runs"]]
    differs = [
        [key, *("-" if value is None else value for value in values)] for key, values in compared["differs"].items()
    ]
    if differs:
        print_table("Where the specs differ", ["key", *names], differs)
    else:
        typer.echo("The specs are the same.")
    columns = [run_columns(row) for row in compared["runs"]]
    print_table("Results", ["", *names], [[key, *(column[key] for column in columns)] for key in columns[0]])


def run_columns(row: dict[str, Any]) -> dict[str, str]:
    """The figures of a run for people, in the order of the list's columns."""

    def loss(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    return {
        "parameters": short(row["params"]),
        "steps": f"{row['steps']:,}/{row['total_steps']:,}",
        "status": row["status"],
        "loss": loss("loss"),
        "validation": loss("val_loss") if row["val_reward"] is None else f"reward {row['val_reward']:.4f}",
        "tokens/s": "-" if row["tokens_per_s"] is None else short(row["tokens_per_s"]),
        "date": row["started"][:10],
    }


# --- runs show -------------------------------------------------------------------------------------------


ROUTINE = ("start", "resume", "save", "copy", "eval", "finish")  # events that other tables show
SHOWN = 20  # newest other events


@app.command()
def show(
    run: RunOrSweep,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", help="Mean time between stops (otherwise: as observed).")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw its time into plots/goodput.png.")] = False,
    json: Json = False,
) -> None:
    """Show one run: attempts, goodput, lost time; or a sweep's trials.

    \b
    Examples:
      lmworks runs show runs/tiny
      lmworks runs show runs/tiny --mtbf 3 --plot
      lmworks runs show runs/tiny --json
      lmworks runs show sweeps/lr
    """
    from ..sweep.listing import is_sweep
    from .runs_sweeps import show_sweep

    if is_sweep(run):
        show_sweep(run, json)
        return
    from ..diagnose.checkpoint_interval import interval
    from ..diagnose.goodput import time_breakdown
    from ..record.run_summary import locate, summarize
    from ..report.plots import draw_goodput
    from ..report.predicted_vs_measured import compare, second_prices

    folder = locate(run)
    summary, found = summarize(folder), time_breakdown(folder)
    advice = interval(folder, summary, found, mtbf)
    unusual = [event for event in folder.events() if event["kind"] not in ROUTINE]
    layers = read_stats(folder.stats_path)[-1:]
    predicted, second = compare(folder, read_metrics(folder.metrics_path)), second_prices(folder)
    drawn = draw_goodput(folder, found) if plot else None
    if json:
        attempts = [vars(one) | {"begin": one.begin / 1e6, "end": one.end / 1e6} for one in found.attempts]
        result: dict[str, Any] = {
            "run": summary.to_dict(),
            "time": found.to_dict(),
            "attempts": attempts,
            "events": unusual,
        }
        result |= {"interval": advice.to_dict() if advice else None, "layers": layers[0] if layers else None}
        result |= {"predicted": [row.to_dict() for row in predicted], "after_steps": second}
        print_json(result | ({"plot": str(drawn)} if drawn else {}))
        return
    print_run(summary)
    print_attempts(found)
    print_time(summary, found)
    print_predicted(predicted, second)
    print_interval(advice, found, mtbf is not None)
    print_events(unusual, found)
    for line in layers:
        print_stats(line, f"Layers at step {line['step']:,}")
    if drawn:
        typer.echo(f"time: {drawn}")


def print_run(summary: Summary) -> None:
    figures = {
        "loss": summary.loss,
        "val loss": summary.val_loss,
        "reward": summary.reward,
        "held-out reward": summary.val_reward,
    }
    said = [f"{name} {value:.4f}" for name, value in figures.items() if value is not None]
    if summary.tokens_per_s:
        said.append(f"{short(summary.tokens_per_s)} tokens/s in a median step")
    typer.echo(f"{summary.name}: {summary.status}, {summary.steps:,} of {summary.total_steps:,} steps")
    if said:
        typer.echo(", ".join(said))


def print_attempts(found: TimeBreakdown) -> None:
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


def print_predicted(rows: Sequence[Row], second: Sequence[Mapping[str, Any]]) -> None:
    """Before the first step, after ten of them, and measured."""
    from ..report.predicted_vs_measured import table_of

    if rows:
        print_table("Predicted and measured", *table_of(rows), drop=("expected", "ratio"))
    for one in second[-1:]:
        typer.echo(
            f"after {one['step']:,} steps the last one was expected at {one['ends'][:16].replace('T', ' ')} UTC, "
            f"evaluations of {duration(one['evaluations_s'])} included"
        )


def print_interval(advice: Interval | None, found: TimeBreakdown, given: bool) -> None:
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


def print_stats(line: Mapping[str, Any], title: str) -> None:
    """The statistics of `health.stats_every` at one step."""
    parts: Mapping[str, Mapping[str, float]] = line["parts"]
    columns = list(dict.fromkeys(key for part in parts.values() for key in part))
    rows = [[name, *(f"{part[key]:.3g}" if key in part else "-" for key in columns)] for name, part in parts.items()]
    print_table(title, ["part", *columns], rows)


# --- runs health -----------------------------------------------------------------------------------------


@app.command()
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
    from ..record.event_text import findings

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
    print_health(found, done, folder)
    if stats:
        if lines:
            print_stats(lines[-1], f"Statistics of step {lines[-1]['step']}")
        else:
            typer.echo("no statistics: health.stats_every = 100 writes them every 100 steps")


def print_health(found: list[Finding], done: list[dict[str, Any]], folder: RunFolder) -> None:
    """A finding takes two lines, which fit into a terminal where a table of sentences would not."""
    from ..record.event_text import describe_event

    for one in found:
        where = "" if one.cursor is None else f" (cursor {one.cursor})"
        typer.echo(f"step {one.step}{where}: {one.what}")
        typer.echo(f"    {one.cause}: {one.why}; done: {one.action}")
    for event in done:
        typer.echo(f"step {event['step']}: {describe_event(event)}")
    cursors = {f.cursor for f in found if f.cause in ("data", "unclear") and f.cursor is not None}
    for cursor in sorted(cursors)[:3]:
        typer.echo(f"see its data: lmworks data window {folder.path} --cursor {cursor}")


# --- runs samples ----------------------------------------------------------------------------------------


@app.command()
def samples(
    run: Run,
    number: Annotated[int | None, typer.Option("--round", help="This round only.")] = None,
    count: Annotated[int, typer.Option("--rounds", min=2, help="How many rounds, from the first to the last.")] = 4,
    json: Json = False,
) -> None:
    """Show answers of an online method, with rewards by source.

    \b
    Examples:
      lmworks runs samples runs/grpo
      lmworks runs samples runs/grpo --rounds 10
      lmworks runs samples runs/grpo --round 0 --json
    """
    from ..record.run_summary import locate
    from ..record.samples import read_samples, spread

    folder = locate(run)
    rounds = read_samples(folder.samples_path)
    if not rounds:
        raise SpecError(f"{run} has no {folder.samples_path.name}: online methods (grpo, ppo, …) write it")
    shown = spread(rounds, count)
    if number is not None:
        shown = [line for line in rounds if line["round"] == number]
        if not shown:
            near = min(rounds, key=lambda line: abs(line["round"] - number))["round"]
            raise SpecError(f"--round {number} has no samples; the nearest round that has is {near}")
    if json:
        print_json({"run": str(run), "rounds": shown})
        return
    for line in shown:
        print_samples(line)
    if len(shown) < len(rounds) and number is None:
        typer.echo(f"{len(shown)} of {len(rounds)} rounds with samples; --rounds or --round shows others")


def print_samples(line: Mapping[str, Any]) -> None:
    from ..record.samples import by_source, printable

    typer.echo(f"─── round {line['round']}, step {line['step']} ───")
    for sample in line["answers"]:
        reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
        end = "ended" if sample["ended"] else "cut"
        typer.echo(f"{reward} ({by_source(sample)}), {counted(sample['tokens'], 'token')}, {end}")
        for name in ("prompt", "answer"):
            typer.echo(f"  {name}: {printable(sample[name])}".replace("\n", "\n          "))


def counted(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


# --- report ----------------------------------------------------------------------------------------------


def report(
    run: Run,
    json: Json = False,
) -> None:
    """Write a run's report.html again, and print its path.

    \b
    Examples:
      lmworks report runs/tiny
    """
    from ..record.run_summary import locate
    from ..report.run_report import write_report

    path = write_report(locate(run))
    if json:
        print_json({"report": str(path)})
    else:
        typer.echo(str(path))
