"""Starting the ranks of a layout on this machine: torchrun's own agent, called directly so that errors stay short."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from ..plan.memory.host import oom_kills
from ..record.oom import ChildPeaks
from ..spec.errors import PREEMPTED, last_line

if TYPE_CHECKING:
    from ..spec import LMWorksError, RunSpec

PROGRAM = ("-m", "lmworks")  # what Python runs as a rank
AFTER_DEADLINE_S = 10  # what a rank has to end by itself after fault.deadline_s, before the agent kills it
STARTED_BY = "LMWORKS_STARTED_BY"  # what tells a rank the process that started it
PR_SET_PDEATHSIG = 1  # of Linux, <sys/prctl.h>


@dataclass(frozen=True)
class Ended:
    """How the ranks of one start ended, and which of them is the cause."""

    code: int = 0  # of the rank, negative for a signal
    cause: str = ""  # as far as it is known outside of the run's own records
    final: bool = False  # to start them again would end the same way
    said: bool = True  # by a rank, on standard error
    rank: int = field(default=0, compare=False)  # which of them
    oom: bool = False  # the kernel killed it, for want of memory
    resident: int | None = None  # bytes: the highest that was seen of it

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def needs_ranks(spec: RunSpec) -> bool:
    """Whether this process must start others: nobody has started them yet, and there are several, or one that offloads
    its parameters, which FSDP2 does as a rank among ranks."""
    return (spec.parallel.world > 1 or spec.parallel.offload == "full") and "RANK" not in os.environ


def start_ranks(spec: RunSpec, arguments: list[str], force: bool = False) -> None:
    """Run `lmworks …arguments` on every rank, and end as they ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    preflight(spec, ranks_here(spec), force)
    try:
        ranks = ranks_here(spec)
        ended = out_of_memory(run_ranks(ranks, arguments, spec.fault.deadline_s), spec, ranks)
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    if ended.code < 0 or not ended.said:
        typer.echo(last_line(ended.cause, ended.code), err=True)
    if ended.code:
        raise typer.Exit(ended.exit_code)


def run_ranks(
    world: int,
    arguments: Sequence[str],
    deadline_s: float,
    launch: str = "",
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Start `world` ranks once, and wait for their end. A signal to this process is handed on to them, then raised."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(deadline_s) + AFTER_DEADLINE_S))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a C++ stack for every call to a store that is gone
    quieten()
    passed = {STARTED_BY: str(os.getpid()), **(variables or {})}
    os.environ.update(passed)
    with TemporaryDirectory(prefix="lmworks-ranks-") as logs:  # of the agent, which else leaves them behind
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=launch or new_launch(),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"timeout": 120},
            max_restarts=0,  # the agent would start anything again; `supervise` looks at the cause
            monitor_interval=0.1,
        )
        kills = oom_kills()
        try:
            with ChildPeaks() as peaks:
                elastic_launch(config, sys.executable)(*PROGRAM, *arguments)
        except ChildFailedError as error:
            ended = judge(error.failures, Path(logs))
            return by_oom_killer(ended, error.failures, peaks, kills) if ended.code == -signal.SIGKILL else ended
        finally:
            for name in passed:
                os.environ.pop(name, None)
    return Ended()


def new_launch() -> str:
    return f"lmworks-{uuid.uuid4().hex[:12]}"


def judge(failures: Mapping[int, Any], logs: Path) -> Ended:
    """The cause among the ends of several ranks, and whether any of them said that it is no use to try again."""
    rank, first = min(failures.items(), key=lambda item: (blame(item[1].exitcode), item[1].timestamp))
    words = [word for path in logs.rglob("error.json") if (word := read_word(path))]
    final = any(word["final"] for word in words)
    code = first.exitcode
    if code < 0:
        return Ended(code, f"rank {rank} was ended by {signal.Signals(-code).name}", final, rank=rank)
    own = read_word(Path(first.error_file))
    # What all ranks know the first one says, unless the agent, which saw another end, stopped it before it could.
    return Ended(code, own["message"] if own else "", final, not own or any(word["said"] for word in words), rank)


def by_oom_killer(ended: Ended, failures: Mapping[int, Any], peaks: ChildPeaks, before: int | None) -> Ended:
    """Whether the kernel's OOM killer sent the SIGKILL: it has ended somebody since, of this group or machine."""
    after = oom_kills()
    if before is None or after is None or after <= before:
        return ended
    return replace(ended, oom=True, resident=peaks.bytes.get(failures[ended.rank].pid))


def out_of_memory(ended: Ended, spec: RunSpec, ranks: int) -> Ended:
    """With what was predicted for the rank that was killed, and what it was last seen with."""
    from ..plan.memory.fit import peak_rows, total
    from ..plan.memory.host_fit import gib
    from ..plan.memory.host_need import host_need
    from ..spec import SpecError

    if not ended.oom:
        return ended
    predicted = "predicted for it: unknown"
    with suppress(SpecError):
        if devices(spec) is None:
            peak = total(peak_rows(spec, ended.rank, "cpu"))
            predicted = f"predicted {gib(peak)} a rank beside its runtime, {ranks} ranks on this machine"
        else:
            host = host_need(spec, ended.rank, "cuda").total
            predicted = f"predicted {gib(host)} of host memory beside its runtime, {ranks} ranks on this machine"
    seen = f"last seen with {gib(ended.resident)} resident" if ended.resident else "its memory was not seen"
    cause = f"rank {ended.rank} ran out of memory: the kernel's OOM killer ended it (SIGKILL); {predicted}; {seen}"
    return replace(ended, cause=cause)


def blame(code: int) -> int:
    """Which end is the cause, 0 first: a signal from outside, then a rank that failed and said why.

    Those that a SIGTERM ended did not fail: torchrun's agent sends it to the ranks that are left.
    """
    return 2 if code in (-signal.SIGTERM, PREEMPTED) else 0 if code < 0 else 1


# --- in a rank ------------------------------------------------------------------------------------------


def leave_word(error: LMWorksError, said: bool) -> None:
    """Tell the agent why this rank ends, and if that was said, in the file that torchrun gives every rank for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if path == os.devnull:
        return
    word = {"message": str(error), "timestamp": int(time.time()), "final": error.final, "said": said}
    half = Path(f"{path}.half")
    with suppress(OSError):  # the run ends anyway
        half.write_text(json.dumps(word))
        half.replace(path)


def read_word(path: Path) -> dict[str, Any] | None:
    try:
        word = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return word if isinstance(word, dict) and {"message", "final", "said"} <= word.keys() else None


def stop_with_starter() -> None:
    """Ask the kernel to stop this rank when the agent that started it is killed: nobody else would then.

    The rank saves and ends, as after any SIGTERM. Linux alone has this.
    """
    starter = os.environ.pop(STARTED_BY, None)  # what a rank starts in its turn is not meant
    if (starter is None and "TORCHELASTIC_RUN_ID" not in os.environ) or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if starter is not None and os.getppid() != int(starter):  # it was killed before the kernel was asked
        sys.exit(128 + signal.SIGTERM)


# --- this machine ---------------------------------------------------------------------------------------


def ranks_here(spec: RunSpec, wanted: int | None = None) -> int:
    """How many ranks to start: those of the layout, or as many as are wanted or left where `fault.elastic` allows it.

    What takes several machines is not started on one.
    """
    from ..spec import SpecError
    from ..spec.elastic import fitted, sizes

    if wanted is not None:
        fitted(spec, wanted)
    elif spec.cluster.nodes > 1:
        raise SpecError(
            f"cluster.nodes = {spec.cluster.nodes}: start the run on every machine with torchrun, "
            "or write a job for all of them with `lmworks launch`"
        )
    ranks, here = wanted or spec.parallel.world, devices(spec)
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

    from ..parallel.memory_preflight import refuse_missing_gpu, refuse_oversized
    from ..spec.elastic import fitted

    refuse_missing_gpu(spec.cluster)
    if not force:
        device = "cpu" if devices(spec) is None else "cuda"
        refuse_oversized(fitted(spec, ranks), torch.device(device), starting=True)


def devices(spec: RunSpec) -> int | None:
    """GPUs that are there now; None where ranks run on the CPU."""
    import torch

    return None if spec.cluster.device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def quieten() -> None:
    """The agent's own reports of a failure repeat what the rank has said, at length."""
    import logging

    for name in list(logging.root.manager.loggerDict):  # each of its modules has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
