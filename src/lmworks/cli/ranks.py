"""Starts the ranks of a layout on this machine with torchrun's elastic agent, called directly for short errors, and
restarts them when they fail (`--max-restarts`).
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import typer

from ..plan.memory.host import oom_kills
from ..record import RunFolder
from ..record.folder import CAUSE, NO_ERROR_MESSAGE, RESTARTS, attempts
from ..record.oom import ChildPeaks
from ..record.parent_death import until_this_process_ends
from ..spec import RunSpec, SpecError
from ..spec.errors import PREEMPTED, STOPPED, last_line
from .error_file import read_error_file

PROGRAM = ("-m", "lmworks")  # what Python runs as a rank
KILL_GRACE_S = 10  # beyond fault.deadline_s, before the agent kills a rank


@dataclass(frozen=True)
class RanksExit:
    """How the ranks of one launch ended, and which of them is the root cause."""

    code: int = 0  # of the rank, negative for a signal
    cause: str = ""  # as far as it is known outside of the run folder
    final: bool = False  # a restart would fail the same way
    reported: bool = True  # printed by a rank on standard error
    rank: int = field(default=0, compare=False)  # the root cause
    oom: bool = False  # killed by the kernel's OOM killer
    resident: int | None = None  # bytes: its highest resident memory

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def needs_ranks(spec: RunSpec) -> bool:
    """Whether this process must start ranks: it is none itself, and there are several, or one that offloads its
    parameters, for which FSDP2 needs a process group."""
    return (spec.ranks > 1 or spec.parallel.offload == "full") and "RANK" not in os.environ


def start_ranks(spec: RunSpec, arguments: list[str], force: bool = False) -> None:
    """Runs `lmworks …arguments` on every rank, and exits as they did."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    preflight(spec, local_ranks(spec), force)
    try:
        ranks = local_ranks(spec)
        ranks_exit = explain_oom(run_ranks(ranks, arguments, spec.fault.deadline_s), spec, ranks)
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    if ranks_exit.code < 0 or not ranks_exit.reported:
        typer.echo(last_line(ranks_exit.cause, ranks_exit.code), err=True)
    if ranks_exit.code:
        raise typer.Exit(ranks_exit.exit_code)


def run_ranks(
    world: int,
    arguments: Sequence[str],
    deadline_s: float,
    launch: str = "",
    variables: Mapping[str, str] | None = None,
) -> RanksExit:
    """Starts `world` ranks once and waits for them. A signal to this process is forwarded to them, then raised."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(deadline_s) + KILL_GRACE_S))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a C++ stack for every call to a store that is gone
    silence_agent_logs()
    passed = {**until_this_process_ends(), **(variables or {})}
    os.environ.update(passed)
    with TemporaryDirectory(prefix="lmworks-ranks-") as logs:  # of the agent, which does not remove them
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=launch or new_launch_id(),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"timeout": 120},
            max_restarts=0,  # the agent restarts whatever the cause; `supervise` looks at it
            monitor_interval=0.1,
        )
        kills = oom_kills()
        try:
            with ChildPeaks() as peaks:
                elastic_launch(config, sys.executable)(*PROGRAM, *arguments)
        except ChildFailedError as error:
            ranks_exit = find_root_cause(error.failures, Path(logs))
            return (
                mark_oom_kill(ranks_exit, error.failures, peaks, kills)
                if ranks_exit.code == -signal.SIGKILL
                else ranks_exit
            )
        finally:
            for name in passed:
                os.environ.pop(name, None)
    return RanksExit()


def new_launch_id() -> str:
    return f"lmworks-{uuid.uuid4().hex[:12]}"


def find_root_cause(failures: Mapping[int, Any], logs: Path) -> RanksExit:
    """The root cause among several failed ranks, and whether any of them reported that a restart is of no use."""
    rank, first = min(failures.items(), key=lambda item: (root_cause_order(item[1].exitcode), item[1].timestamp))
    error_records = [error_record for path in logs.rglob("error.json") if (error_record := read_error_file(path))]
    final = any(each["final"] for each in error_records)
    code = first.exitcode
    if code < 0:
        return RanksExit(code, f"rank {rank} was ended by {signal.Signals(-code).name}", final, rank=rank)
    own = read_error_file(Path(first.error_file))
    # What all ranks know rank 0 reports, unless the agent stopped it before it could.
    return RanksExit(
        code,
        own["message"] if own else "",
        final,
        not own or any(each["reported"] for each in error_records),
        rank,
    )


def mark_oom_kill(
    ranks_exit: RanksExit, failures: Mapping[int, Any], peaks: ChildPeaks, before: int | None
) -> RanksExit:
    """Marks a SIGKILL as the OOM killer's where its counter (of the cgroup or machine) has grown."""
    after = oom_kills()
    if before is None or after is None or after <= before:
        return ranks_exit
    return replace(ranks_exit, oom=True, resident=peaks.bytes.get(failures[ranks_exit.rank].pid))


def explain_oom(ranks_exit: RanksExit, spec: RunSpec, ranks: int) -> RanksExit:
    """Adds the predicted and the last measured memory of a rank that the OOM killer ended.

    The counter may be out of sight (a container, a batch system). A SIGKILL without it is a likely OOM if the ranks do
    not fit this machine.
    """
    from ..plan.memory.fit import peak_rows, total
    from ..plan.memory.host_need import gib, host_need

    if not ranks_exit.oom:
        if ranks_exit.code == -signal.SIGKILL:
            try:
                preflight(spec, ranks, force=False)
            except SpecError as oversized:
                return replace(ranks_exit, cause=f"{ranks_exit.cause}; it probably ran out of memory: {oversized}")
        return ranks_exit
    predicted = "predicted for it: unknown"
    with suppress(SpecError):
        if ranks_exit.rank >= spec.parallel.world:
            pass  # a rollout rank
        elif gpu_count(spec) is None:
            peak = total(peak_rows(spec, ranks_exit.rank, "cpu"))
            predicted = f"predicted {gib(peak)} a rank beside its runtime, {ranks} ranks on this machine"
        else:
            host = host_need(spec, ranks_exit.rank, "cuda").total
            predicted = f"predicted {gib(host)} of host memory beside its runtime, {ranks} ranks on this machine"
    seen = f"last seen with {gib(ranks_exit.resident)} resident" if ranks_exit.resident else "its memory was not seen"
    cause = f"rank {ranks_exit.rank} ran out of memory: the kernel's OOM killer ended it (SIGKILL); {predicted}; {seen}"
    return replace(ranks_exit, cause=cause)


def root_cause_order(code: int) -> int:
    """Which exit is the root cause, 0 first: a signal from outside, then a rank that failed with an error.

    Those that a SIGTERM ended did not fail: torchrun's agent sends it to the ranks that are left.
    """
    return 2 if code in (-signal.SIGTERM, PREEMPTED) else 0 if code < 0 else 1


# --- this machine ---------------------------------------------------------------------------------------


def local_ranks(spec: RunSpec, wanted: int | None = None) -> int:
    """How many ranks to start: those of the layout, or `wanted`, or as many as there are GPUs with `fault.elastic`.

    A run on several machines is refused.
    """
    from ..spec.elastic import fitted, sizes

    if wanted is not None:
        fitted(spec, wanted)
    elif spec.cluster.nodes > 1:
        raise SpecError(
            f"cluster.nodes = {spec.cluster.nodes}: start the run on every machine with torchrun, "
            "or write a job for all of them with `lmworks launch`"
        )
    ranks, here = wanted or spec.ranks, gpu_count(spec)
    if here is None or ranks <= here:
        return ranks
    fewer = sizes(spec, at_most=here) if wanted is None else []
    if fewer:
        return fewer[0]
    raise SpecError(
        f"the layout needs {ranks} GPUs and this machine has {here}: start it on several with "
        "torchrun or `lmworks launch`, or run it on the CPU with --device cpu"
    )


def preflight(spec: RunSpec, ranks: int, force: bool) -> None:
    """Refuse, before any rank is started, what this machine has no GPU or no memory for."""
    import torch

    from ..parallel.preflight import check_fits_memory, check_gpu_available
    from ..spec.elastic import fitted

    check_gpu_available(spec.cluster)
    if not force:
        device = "cpu" if gpu_count(spec) is None else "cuda"
        check_fits_memory(fitted(spec, ranks), torch.device(device), starting=True)


def gpu_count(spec: RunSpec) -> int | None:
    """Available GPUs; None where ranks run on the CPU."""
    import torch

    return None if spec.cluster.device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def silence_agent_logs() -> None:
    """The agent's own reports of a failure repeat what the rank has printed, at length."""
    import logging

    for name in list(logging.root.manager.loggerDict):  # each of its modules has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


# --- restarts --------------------------------------------------------------------------------------------

# The agent runs each generation once; whether there is a next one is decided here, since the agent would restart
# whatever the cause: a wrong spec, a run that was asked to stop.


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
