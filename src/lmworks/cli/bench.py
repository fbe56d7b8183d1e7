"""`lmworks bench`: measure training, kernels, the engine or a server; compare strategies and number formats."""

from __future__ import annotations

import typer

from .bench_compare import ddp_fsdp, precision
from .bench_kernels import kernels
from .bench_offline import offline
from .bench_profile import app as profile
from .bench_serve import serve
from .bench_train import train
from .groups import CommandGroup

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Benchmark training, kernels, the engine, or any server."
)
app.command(rich_help_panel="Measure")(train)
app.command(rich_help_panel="Measure")(kernels)
app.command(rich_help_panel="Measure")(offline)
app.command(rich_help_panel="Measure")(serve)
app.add_typer(profile, name="profile", rich_help_panel="Measure")
app.command("ddp-fsdp", rich_help_panel="Compare")(ddp_fsdp)
app.command(rich_help_panel="Compare")(precision)
