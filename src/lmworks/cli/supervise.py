"""`--max-restarts`: restarts the ranks of a run from the newest committed checkpoint when they fail.

torchrun's agent runs each generation once; whether there is a next one is decided here, since the agent would restart
whatever the cause: a wrong spec, a run that was asked to stop.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..record import RunFolder
from ..record.attempts import CAUSE, NO_ERROR_MESSAGE, RESTARTS, attempts
from ..spec.errors import PREEMPTED, STOPPED, last_line
from .ranks import RanksExit, explain_oom, local_ranks, new_launch_id, preflight, run_ranks

if TYPE_CHECKING:
    from ..spec import RunSpec


def supervise(
    spec: RunSpec,
    folder: RunFolder,
    first: list[str],
    again: list[str],
    max_restarts: int,
    ranks: int | None = None,
    force: bool = False,
) -> None:
    """Runs `lmworks …first` on all ranks, then `lmworks …again` while restarts help; exits as the last did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal.signal(signal.SIGTERM, raise_signal)  # the agent's handler is installed only while ranks run
    preflight(spec, local_ranks(spec, ranks), force)
    launch, cause = new_launch_id(), ""
    try:
        for count in range(max_restarts + 1):
            arguments = again if folder.spec_path.exists() and count else first
            variables = {RESTARTS: str(count), CAUSE: cause} if count else {}
            world = local_ranks(spec, ranks)
            ranks_exit = explain_oom(run_ranks(world, arguments, spec.fault.deadline_s, launch, variables), spec, world)
            cause = ranks_exit.cause or recorded_cause(folder)
            if not ranks_exit.code or ranks_exit.final or ranks_exit.code in STOPPED:
                break
            if ranks_exit.oom and not moved(folder):
                break  # the next start would need as much memory
            if count < max_restarts:
                typer.echo(f"lmworks: {cause}; started again ({count + 1} of {max_restarts})", err=True)
    except SignalException as stopped:
        record_end(folder, "interrupt", f"stopped by {stopped.sigval.name}")
        raise typer.Exit(PREEMPTED if stopped.sigval == signal.SIGTERM else 128 + stopped.sigval) from None
    exit_as_ranks_did(ranks_exit, folder)


def raise_signal(number: int, _frame: object) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("stopped", signal.Signals(number))


def exit_as_ranks_did(ranks_exit: RanksExit, folder: RunFolder) -> None:
    """A rank that failed has reported why; for one that was killed, this process does."""
    if ranks_exit.code < 0:
        record_end(
            folder,
            "fail",
            ranks_exit.cause,
            **({"cause": "oom", "measured_bytes": ranks_exit.resident} if ranks_exit.oom else {}),
        )
        more = "" if ranks_exit.oom else "; the run can be resumed"
        typer.echo(f"lmworks: error: {ranks_exit.cause}{more}", err=True)
    elif not ranks_exit.reported:
        typer.echo(last_line(ranks_exit.cause, ranks_exit.code), err=True)
    if ranks_exit.code:
        raise typer.Exit(ranks_exit.exit_code)


def recorded_cause(folder: RunFolder) -> str:
    """The cause in the run folder: a rank that was stopped in a hang reports none to its agent."""
    past = attempts(folder)
    return past[-1].cause if past else NO_ERROR_MESSAGE


def moved(folder: RunFolder) -> bool:
    """Whether the last attempt completed a step, so that a step fits into memory."""
    past = attempts(folder)
    return bool(past) and past[-1].moved


def record_end(folder: RunFolder, kind: str, error: str, **figures: Any) -> None:
    """Records an end that the ranks could not record themselves."""
    past = attempts(folder)
    if past and not past[-1].done and not folder.is_locked():
        folder.event(kind, past[-1].step, error=error, **figures)
