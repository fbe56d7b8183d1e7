"""`lmworks runs` and `lmworks report`: list, compare and diagnose run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .diagnose import diagnose
from .groups import DefaultCommandGroup
from .health import health
from .output import Json, print_json, print_table
from .runs_show import show


class FoldersOrCommand(DefaultCommandGroup):
    """`lmworks runs DIR…` is `lmworks runs ls DIR…`."""

    default_command = "ls"


app = typer.Typer(
    cls=FoldersOrCommand,
    rich_markup_mode=None,
    help="List and show runs; diagnose bad steps and hangs.",
)


@app.command("ls")
def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Runs, or folders with runs below (by default runs/)."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show where the given runs differ, side by side.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw their loss curves into this file.")] = None,
    json: Json = False,
) -> None:
    """List runs, the newest first, or compare some of them.

    `lmworks runs DIR` is `lmworks runs ls DIR`; a folder named like a command is written `./health`.

    \b
    Examples:
      lmworks runs
      lmworks runs runs/sweep --json
      lmworks runs --compare runs/tiny runs/tiny-2 --plot loss.png
    """
    from ..report.plots import check_plot_path, overlay_losses
    from ..report.run_list import compare_runs, find_runs, list_runs, locate
    from ..spec import SpecError

    if plot:
        check_plot_path(plot, "--plot")
    if compare:
        if len(places or ()) < 2:
            raise SpecError("--compare needs at least two runs, e.g. `lmworks runs --compare runs/a runs/b`")
        folders = [locate(place) for place in places or ()]
        compared = compare_runs(folders)
    else:
        folders = find_runs(places or ())
        listed = list_runs(folders)
    if plot:
        overlay_losses(folders, plot)
    if json:
        print_json(compared if compare else listed)
    elif compare:
        print_comparison(compared)
    else:
        print_list(listed)
    if plot and not json:
        typer.echo(f"loss curves: {plot}")


app.command()(show)
app.command()(health)
app.command()(diagnose)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its name below runs/.")],
    json: Json = False,
) -> None:
    """Write a run's report.html again, and print its path.

    \b
    Examples:
      lmworks report runs/tiny
    """
    from ..report.run_list import locate
    from ..report.run_report import write_report

    path = write_report(locate(run))
    if json:
        print_json({"report": str(path)})
    else:
        typer.echo(str(path))


def print_list(listed: list[dict[str, Any]]) -> None:
    if not listed:
        typer.echo("no runs yet; start one with `lmworks train configs/tiny.toml`")
        return
    columns = ["run", "params", "steps", "status", "loss", "val", "tok/s", "date"]
    readable = [row for row in listed if row["status"] != "unreadable"]
    rows = [[row["path"], *figures(row).values()] for row in readable]
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
    columns = [figures(row) for row in compared["runs"]]
    print_table("What came of it", ["", *names], [[key, *(column[key] for column in columns)] for key in columns[0]])


def figures(row: dict[str, Any]) -> dict[str, str]:
    """The figures of a run for people, in the order of the list's columns."""
    from ..record.figures import short

    def loss(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    return {
        "parameters": short(row["params"]),
        "steps": f"{row['steps']:,}/{row['total_steps']:,}",
        "status": row["status"],
        "loss": loss("loss"),
        "val loss": loss("val_loss"),
        "tokens/s": "-" if row["tokens_per_s"] is None else short(row["tokens_per_s"]),
        "date": row["started"][:10],
    }
