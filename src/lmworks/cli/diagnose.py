"""`lmworks runs diagnose`: why ranks of a run waited for one another, and which of them was the cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..diagnose.hang import Diagnosis


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its name below runs/.")],
    attempt: Annotated[int | None, typer.Option(help="Which attempt's hang (by default the last).")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print the stacks of every rank's threads.")] = False,
    json: Json = False,
) -> None:
    """Find the cause of a hang, or show where each rank is now.

    \b
    Examples:
      lmworks runs diagnose runs/tiny
      lmworks runs diagnose runs/tiny --stacks
      lmworks runs diagnose runs/tiny --attempt 0 --json
    """
    from ..diagnose.hang import diagnose
    from ..report.run_list import locate

    found = diagnose(locate(run), attempt)
    if json:
        print_json(found.to_dict())
    else:
        print_diagnosis(found, stacks)


def print_diagnosis(found: Diagnosis, stacks: bool) -> None:
    for number, text in found.earlier.items():
        typer.echo(f"attempt {number} ended so: {text} (more with --attempt {number})")
    if found.verdict is not None:
        typer.echo(f"attempt {found.attempt}: {found.verdict.text}")
    for text in found.failed_saves:
        typer.echo(text)
    for writer in found.writers:
        of = f"the writer process of rank {writer.rank} on {writer.host} (pid {writer.pid})"
        typer.echo(f"{of} is {writer.state}, at {writer.checkpoint} for {writer.for_s:.1f} s")
    if found.verdict is None and not found.ranks:
        if not (found.writers or found.failed_saves):
            typer.echo(f"{found.run}: no hang is on record, and no rank of several is training now")
        return
    rows = [
        [
            one.rank,
            one.host,
            one.state,
            one.place,
            one.waits_in or "-",
            "-" if one.for_s is None else f"{one.for_s:.1f}",
        ]
        for one in found.ranks
    ]
    print_table("Ranks", ["rank", "host", "process", "in", "waits in", "for s"], rows, drop=("host",))
    if found.folder:
        typer.echo(f"reports, with stacks and the last collectives: {found.folder}")
    for one in found.ranks if stacks else ():
        typer.echo(f"\nrank {one.rank}\n{one.stacks or 'no stacks: it could not answer'}")
