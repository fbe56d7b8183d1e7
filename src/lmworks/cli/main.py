"""The `lmworks` command: gathers the groups, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from .. import __version__
from ..record.oom import as_oom
from ..spec.errors import LMWorksError, last_line
from . import bench, chat, checkpoint, data, demo, evaluate, generate, launch, plan, prove, quantize, runs, serve, train
from .address_space import check_address_space
from .groups import RootGroup
from .override_hints import refuse_key_as_option
from .ranks import die_with_parent, write_error_file

# Panel of the help → word → command. What comes next has its panel already: `finetune`, `sweep` (data and training);
# `scaling`, `tune` (plan); `evals`, `gateway`, `fleet` (use and serve); `learn`, `ui` (learn).
PANELS: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
    "Plan": {"plan": plan.app},
    "Data and training": {
        "data": data.app,
        "train": train.train,
        "resume": train.resume,
        "launch": launch.app,
        "checkpoint": checkpoint.app,
    },
    "Look and prove": {"runs": runs.app, "report": runs.report, "bench": bench.app, "prove": prove.app},
    "Use and serve": {
        "generate": generate.generate,
        "chat": chat.chat,
        "serve": serve.serve,
        "eval": evaluate.evaluate,
        "quantize": quantize.quantize,
    },
    "Learn": {"demo": demo.demo},
}


class Interrupted(Exception):
    """Ctrl-C. Typer ends the process on a KeyboardInterrupt, and lets this through."""


class Commands(RootGroup):
    order: ClassVar = [word for panel in PANELS.values() for word in panel]
    former: ClassVar = {
        "models": "plan models",
        "hardware": "plan hardware",
        "mesh": "plan mesh",
        "pipeline": "plan pipeline",
        "health": "runs health",
        "diagnose": "runs diagnose",
        "parity": "prove parity",
        "chaos": "prove chaos",
        "simulate": "prove simulate",
        "study": "bench",
        "profile": "bench profile",
        "export": "checkpoint export",
    }

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
for panel, words in PANELS.items():
    for word, command in words.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=word, rich_help_panel=panel)
        else:
            app.command(word, rich_help_panel=panel)(command)


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
    die_with_parent()
    check_address_space()
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
    """Print one line, report the error to the process that started this rank, and exit with the error's code."""
    rank = os.environ.get("RANK", "0")
    mine = rank == "0" or not error.collective  # what every rank raises, the first one says
    if mine and not error.reported:
        who = "" if rank == "0" or str(error).startswith(f"rank {rank}: ") else f"rank {rank}: "
        typer.echo(last_line(f"{who}{error}", error.exit_code), err=True)
    write_error_file(error, reported=mine or error.reported)
    sys.exit(error.exit_code)
