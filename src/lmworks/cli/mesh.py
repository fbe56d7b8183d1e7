"""`lmworks plan mesh`: the ranks of a layout and their process groups."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import Json, Overrides, Spec, print_json, print_table


def mesh(
    spec: Spec,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank whose neighbours are shown.")] = 0,
    json: Json = False,
) -> None:
    """Show the ranks of a layout and their process groups.

    \b
    Examples:
      lmworks plan mesh configs/tiny.toml parallel.dp=2 parallel.tp=2 parallel.pp=2
      lmworks plan mesh llama3-70b parallel.tp=8 parallel.pp=8 parallel.dp=16 parallel.strategy=fsdp2 --rank 777
    """
    from ..spec import Grid, SpecError, load_run

    grid = Grid.of(load_run(spec, overrides or ()).parallel)
    if not 0 <= rank < grid.world:
        raise SpecError(f"--rank {rank}: the layout has ranks 0 … {grid.world - 1}")
    place = grid.coordinates(rank)
    rows = grid.table(rank)
    if json:
        axes = {axis: {"size": size, "group": grid.group(axis, rank), "exchange": what} for axis, size, _, what in rows}
        print_json({"world": grid.world, "rank": rank, "place": place, "axes": axes})
        return
    typer.echo(f"{grid.world} ranks; rank {rank} stands at " + ", ".join(f"{row[0]} {place[row[0]]}" for row in rows))
    print_table("", ["axis", "ranks", f"group of rank {rank}", "what they exchange"], rows)
    if grid.world <= 64:
        used = [row[0] for row in rows]
        where = [(number, *(grid.coordinates(number)[axis] for axis in used)) for number in range(grid.world)]
        print_table("where every rank stands", ["rank", *used], where)
