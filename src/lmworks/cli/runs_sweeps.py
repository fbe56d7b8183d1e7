"""Sweeps in `lmworks runs`: a table of them, and one with its trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from .output import print_json, print_table


def print_sweeps(listed: Sequence[dict[str, Any]]) -> None:
    columns = ["sweep", "kind", "keys", "status", "trials", "best val", "of trial", "date"]
    rows = [
        [
            row["path"],
            row["kind"],
            ", ".join(row["keys"]),
            row["status"],
            ", ".join(f"{count} {state}" for state, count in row["trials"].items()),
            f"{row['best']['val_loss']:.4f}" if row["best"] else "-",
            row["best"]["number"] if row["best"] else "-",
            row["created"][:10],
        ]
        for row in listed
        if row["status"] != "unreadable"
    ]
    if rows:
        print_table("Sweeps", columns, rows, drop=("date", "kind", "of trial", "keys"))
    for row in listed:
        if row["status"] == "unreadable":
            typer.echo(f"{row['path']}: {row['error']}", err=True)


def show_sweep(path: Path, json: bool) -> None:
    """Its trials and the best of them, while it runs too."""
    from ..sweep.folder import Sweep
    from ..sweep.listing import summarize_sweep
    from ..sweep.progress import Progress
    from .sweep_display import print_trials

    sweep = Sweep.open(path)
    rows = Progress(sweep, 1).update(sweep.trials())
    if json:
        print_json({**summarize_sweep(path), "trials": [row.to_dict() for row in rows]})
        return
    print_trials(f"Trials of {path}", rows)
    typer.echo(f"see one: lmworks runs show {path}/trials/0000")
