"""The `lmworks` command: gathers the groups, and turns errors into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Annotated, Any, ClassVar, NoReturn

import typer

from .. import __version__
from ..plan.memory.host import process_bytes
from ..record.parent_death import die_with_parent
from ..spec.errors import LMWorksError, SpecError, last_line, near_keys, suggestion
from .error_file import write_error_file
from .groups import RootGroup

# Panel of the help → word → where its command is: a module of this folder, imported when the word is typed.
PANELS: dict[str, dict[str, str]] = {
    "Plan": {"plan": "plan.app", "scaling": "scaling.app"},
    "Data and training": {
        "data": "data.app",
        "train": "train.train",
        "finetune": "finetune.finetune",
        "resume": "train.resume",
        "launch": "launch.app",
        "sweep": "sweep.app",
        "tune": "tune.app",
        "checkpoint": "checkpoint.app",
    },
    "Look and prove": {
        "runs": "runs.app",
        "report": "runs.report",
        "profile": "profile.app",
        "diagnose": "diagnose.diagnose",
        "bench": "bench.app",
        "prove": "prove.app",
    },
    "Use and serve": {
        "generate": "generate.generate",
        "chat": "chat.chat",
        "serve": "serve.serve",
        "batch": "batch.batch",
        "gateway": "gateway.app",
        "kv-store": "kv_store.kv_store",
        "fleet": "fleet.app",
        "drill": "drill.drill",
        "lsp": "lsp.lsp",
        "eval": "train.evaluate",
        "evals": "evals.app",
        "quantize": "quantize.quantize",
    },
    "Learn": {"demo": "demo.demo", "learn": "learn.app"},
}


class Interrupted(Exception):
    """Ctrl-C. Typer ends the process on a KeyboardInterrupt, and lets this through."""


class Commands(RootGroup):
    panels: ClassVar = PANELS
    former: ClassVar = {
        "models": "plan models",
        "hardware": "plan hardware",
        "mesh": "plan mesh",
        "pipeline": "plan pipeline",
        "health": "runs health",
        "runs diagnose": "diagnose",
        "parity": "prove parity",
        "chaos": "prove chaos",
        "simulate": "prove simulate",
        "study": "bench",
        "bench profile": "profile",
        "export": "checkpoint export",
    }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with ended_by_interrupt():
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except Exception as error:
            check_key_as_option(error, sys.argv[1:])
            raise


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """While a command is loaded, Ctrl-C ends the process without a word, as before (`lmworks.__main__`)."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


app = typer.Typer(
    name="lmworks",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        from ..record.oom import as_oom

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


# --- limits of address space -----------------------------------------------------------------------------

# `ulimit -v` or `-d` may be too small for PyTorch. Libraries that cannot map memory while they are loaded end the
# process in many ways: an ImportError, an abort, a segmentation fault. Where there is a limit, a child process loads
# the library first and reports what is left.


MIB = 2**20
RUNTIME = 384 * MIB  # that a run maps beside its threads: modules, libraries and buffers loaded later
THREAD = 128 * MIB  # an arena of glibc's allocator and a stack
# Library → a program that prints how much of the address space is left, less what the library takes later.
PROBES = {
    "numpy": "import numpy; print(0)",
    "torch": "import torch; from lmworks.plan.memory.host import process_bytes as left; "
    f"print(left() - {RUNTIME} - {THREAD} * torch.get_num_threads())",
}


class AddressSpaceCheck(MetaPathFinder):
    """Runs a probe when its library is imported: commands that do without it need less."""

    def __init__(self) -> None:
        self.probes = {name: probe for name, probe in PROBES.items() if name not in sys.modules}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if probe := self.probes.pop(fullname, None):
            run_probe(probe)
        return None


def check_address_space() -> None:
    """Install the check, where this process has a limit. Ranks have the limits of the process that started them."""
    if "RANK" not in os.environ and process_bytes() is not None:
        sys.meta_path.insert(0, AddressSpaceCheck())


def run_probe(probe: str) -> None:
    import subprocess

    there = process_bytes()
    if there is None:
        return
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    left = None if ended.returncode else int(ended.stdout)
    if left is not None and left >= 0:
        return
    missing = "more" if left is None else f"about {-left / MIB:,.0f} MiB more"
    raise SpecError(
        f"the limit of this process (ulimit -v or -d) leaves it {there / MIB:,.0f} MiB of address space, and PyTorch "
        f"with its threads needs {missing}; `ulimit -v unlimited` lifts it, OMP_NUM_THREADS=1 needs less"
    )


# --- `--lr 1` where `optim.lr=1` is meant ----------------------------------------------------------------


def check_key_as_option(error: Exception, words: Sequence[str]) -> None:
    """Where `error` is an unknown option that a spec has a key for, say how that key is written. `words` were typed."""
    option, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "command", None)
    unknown = hasattr(error, "possibilities") and option.startswith("--") and command is not None
    if not unknown or misspelt(option, command):
        return
    keys, name = accepted_keys(command), option.lstrip("-").replace("-", "_")
    near = [name] if name in keys else near_keys(name.rpartition(".")[2], keys)
    if near:
        typed = suggestion([f"{key}={value_of(option, words)}" for key in near])
        raise SpecError(f"there is no option {option}{typed} (a spec's keys are given as SECTION.KEY=VALUE)") from None


def misspelt(option: str, command: Any) -> bool:
    """Whether the command has an option that is spelt almost like it; the parser's own message names that one."""
    own = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    return bool(difflib.get_close_matches(option, own, n=1, cutoff=0.8))


def accepted_keys(command: Any) -> Iterable[str]:
    """Keys of the spec that a command takes overrides of; none where it takes none."""
    from ..spec import EngineSpec, RunSpec

    taken = {parameter.metavar for parameter in command.params if parameter.metavar}
    if "[SECTION.KEY=VALUE]..." in taken:
        return RunSpec.dotted_keys()
    return EngineSpec.dotted_keys() if any("engine.KEY=VALUE" in metavar for metavar in taken) else ()


def value_of(option: str, words: Sequence[str]) -> str:
    """What was typed after it, or after its equals sign."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after if after and not after.startswith("-") else "VALUE"
    return "VALUE"
