"""`lmworks prove`: proofs by comparison of what layouts compute, what faults cost, and what one rank holds."""

from __future__ import annotations

import typer

from .chaos import chaos
from .groups import CommandGroup
from .parity import parity
from .simulate import simulate

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Check layouts, recovery and memory: parity, faults, simulation.",
)
app.command()(parity)
app.command()(chaos)
app.command()(simulate)
