"""`lmworks bench link`: a command on two nodes of this machine, with a link of a given bandwidth, delay and loss."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..spec import TrainingError


def link(
    shape: Annotated[str, typer.Argument(metavar="LINK", help="Bandwidth, delay one way, loss: 200mbit,5ms,0.1%.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What every rank runs.")],
    per_node: Annotated[int, typer.Option("--ranks-per-node", min=1, max=32, help="Ranks on each node.")] = 1,
) -> None:
    """Run a command on two local nodes over a shaped link.

    The nodes are network namespaces (Linux, root, iproute2). Ranks find RANK, WORLD_SIZE, MASTER_ADDR and the rest as
    under torchrun.

    \b
    Examples:
      lmworks bench link 200mbit,5ms -- lmworks train configs/tiny.toml parallel.dp=2
      lmworks bench link 1gbit --ranks-per-node 2 -- python train.py
    """
    from ..bench.shaped_link import LinkShape, run_on_both, shaped_link

    with shaped_link(LinkShape.parse(shape)) as shaped:
        for what, how in shaped.how.items():
            typer.echo(f"{what} of the link: {how}", err=True)
        words = [sys.executable, "-m", "lmworks", *command[1:]] if command[0] == "lmworks" else command
        codes = run_on_both(shaped, words, per_node)
    if any(codes):
        raise TrainingError(f"the command ended with exit codes {', '.join(map(str, codes))}, by rank")
