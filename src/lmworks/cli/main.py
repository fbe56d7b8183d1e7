"""The `lmworks` command: gathers the groups, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from .. import __version__
from ..record.oom import as_oom
from ..spec.errors import LMWorksError, last_line
from . import (
    bench,
    chaos,
    chat,
    checkpoint,
    data,
    demo,
    diagnose,
    generate,
    hardware,
    health,
    launch,
    mesh,
    models,
    parity,
    pipeline,
    plan,
    profile,
    quantize,
    runs,
    serve,
    simulate,
    study,
    train,
    use,
)
from .override_hints import refuse_key_as_option
from .ranks import leave_word, stop_with_starter


class Interrupted(Exception):
    """Ctrl-C. Typer ends the process on a KeyboardInterrupt, and lets this through."""


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except Exception as error:
            refuse_key_as_option(error, sys.argv[1:])
            raise


app = typer.Typer(
    name="lmworks",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("models")(models.models)
app.command("hardware")(hardware.hardware)
app.add_typer(plan.app, name="plan")
app.command("mesh")(mesh.mesh)
app.command("pipeline")(pipeline.pipeline)
app.command("simulate")(simulate.simulate)
app.add_typer(runs.app, name="runs")
app.command("report")(runs.report)
app.command("health")(health.health)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("diagnose")(diagnose.diagnose)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(launch.app, name="launch")
app.command("parity")(parity.parity)
app.command("chaos")(chaos.chaos)
app.add_typer(study.app, name="study")
app.command("eval")(use.evaluate)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.add_typer(bench.app, name="bench")
app.add_typer(profile.app, name="profile")
app.command("export")(checkpoint.export)
app.command("quantize")(quantize.quantize)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmworks {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan, train and serve language models with one spec."""


def main() -> None:
    """Exit codes: 0 done, 1 the job failed, 2 bad usage, 75 SIGTERM (start it again), 130 interrupted."""
    stop_with_starter()
    try:
        app(prog_name="lmworks")
    except LMWorksError as error:
        fail(error)
    except (Interrupted, KeyboardInterrupt):
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # a pipe's reader was interrupted too
                typer.echo("lmworks: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        cause = as_oom(error)
        if not isinstance(cause, LMWorksError):
            raise
        fail(cause)


def fail(error: LMWorksError) -> NoReturn:
    """One line, an exit code, and word to whoever started this rank."""
    rank = os.environ.get("RANK", "0")
    mine = rank == "0" or not error.collective  # what every rank raises, the first one says
    if mine and not error.reported:
        who = "" if rank == "0" or str(error).startswith(f"rank {rank}: ") else f"rank {rank}: "
        typer.echo(last_line(f"{who}{error}", error.exit_code), err=True)
    leave_word(error, said=mine or error.reported)
    sys.exit(error.exit_code)
