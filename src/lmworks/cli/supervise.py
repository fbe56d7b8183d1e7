"""`--max-restarts`: the ranks of a run, started again from the newest committed step when they fail.

torchrun's agent starts and watches them, once for every generation; whether there is a next one is decided here, since
the agent would start again whatever happened: a spec that is wrong, a run that was asked to stop.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..record import RunFolder
from ..record.attempts import CAUSE, NO_ERROR_MESSAGE, RESTARTS, attempts
from ..spec.errors import PREEMPTED, STOPPED, last_line
from .ranks import Ended, new_launch, out_of_memory, preflight, ranks_here, run_ranks

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
    """Run `lmworks …first` on all ranks, then `lmworks …again` as often as it helps; end as the last of them ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal.signal(signal.SIGTERM, stop)  # the agent's own is there only while ranks are
    preflight(spec, ranks_here(spec, ranks), force)
    launch, cause = new_launch(), ""
    try:
        for count in range(max_restarts + 1):
            arguments = again if folder.spec_path.exists() and count else first
            told = {RESTARTS: str(count), CAUSE: cause} if count else {}
            world = ranks_here(spec, ranks)
            ended = out_of_memory(run_ranks(world, arguments, spec.fault.deadline_s, launch, told), spec, world)
            cause = ended.cause or recorded(folder)
            if not ended.code or ended.final or ended.code in STOPPED:
                break
            if ended.oom and not moved(folder):
                break  # the next start would take as much, and end so too
            if count < max_restarts:
                typer.echo(f"lmworks: {cause}; started again ({count + 1} of {max_restarts})", err=True)
    except SignalException as stopped:
        record_end(folder, "interrupt", f"stopped by {stopped.sigval.name}")
        raise typer.Exit(PREEMPTED if stopped.sigval == signal.SIGTERM else 128 + stopped.sigval) from None
    end_as(ended, folder)


def stop(number: int, _frame: object) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("stopped", signal.Signals(number))


def end_as(ended: Ended, folder: RunFolder) -> None:
    """A rank that failed has said why; of one that was killed only its agent can."""
    if ended.code < 0:
        record_end(
            folder, "fail", ended.cause, **({"cause": "oom", "measured_bytes": ended.resident} if ended.oom else {})
        )
        more = "" if ended.oom else "; the run can be resumed"
        typer.echo(f"lmworks: error: {ended.cause}{more}", err=True)
    elif not ended.said:
        typer.echo(last_line(ended.cause, ended.code), err=True)
    if ended.code:
        raise typer.Exit(ended.exit_code)


def recorded(folder: RunFolder) -> str:
    """What the run itself says of its end: a rank that was called off while it hung says nothing to its agent."""
    past = attempts(folder)
    return past[-1].cause if past else NO_ERROR_MESSAGE


def moved(folder: RunFolder) -> bool:
    """Whether the last start took a step: what it does in one fits then, or did."""
    past = attempts(folder)
    return bool(past) and past[-1].moved


def record_end(folder: RunFolder, kind: str, error: str, **figures: Any) -> None:
    """What the ranks had no time to write, or did not know."""
    past = attempts(folder)
    if past and not past[-1].done and not folder.is_locked():
        folder.event(kind, past[-1].step, error=error, **figures)
