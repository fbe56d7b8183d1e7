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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from ..spec.errors import PREEMPTED

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

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def needs_ranks(spec: RunSpec) -> bool:
    """Whether this process must start others: nobody has started them yet, and there are several, or one that offloads
    its parameters, which FSDP2 does as a rank among ranks."""
    return (spec.parallel.world > 1 or spec.parallel.offload == "full") and "RANK" not in os.environ


def start_ranks(spec: RunSpec, arguments: list[str]) -> None:
    """Run `lmworks …arguments` on every rank, and end as they ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        ended = run_ranks(ranks_here(spec), arguments, spec.fault.deadline_s)
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    if ended.code < 0 or not ended.said:
        typer.echo(f"lmworks: error: {ended.cause}", err=True)
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
        try:
            elastic_launch(config, sys.executable)(*PROGRAM, *arguments)
        except ChildFailedError as error:
            return judge(error.failures, Path(logs))
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
        return Ended(code, f"rank {rank} was ended by {signal.Signals(-code).name}", final)
    own = read_word(Path(first.error_file))
    # What all ranks know the first one says, unless the agent, which saw another end, stopped it before it could.
    return Ended(code, own["message"] if own else "", final, not own or any(word["said"] for word in words))


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
        "torchrun or `lmworks launch`, or set cluster.device = 'cpu'"
    )


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
