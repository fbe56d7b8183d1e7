"""Starting the ranks of a layout on this machine: torchrun's own agent, called directly so that errors stay short."""

from __future__ import annotations

import os
import signal
import sys
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..spec import RunSpec

GRACE_S = 180  # what a stopped run has to finish its step and save, before it is killed
STARTED_BY = "LMWORKS_STARTED_BY"  # what tells a rank the process that started it
PR_SET_PDEATHSIG = 1  # of Linux, <sys/prctl.h>


def needs_ranks(spec: RunSpec) -> bool:
    """Whether this process must start others: nobody has started them yet, and there are several, or one that offloads
    its parameters, which FSDP2 does as a rank among ranks."""
    return (spec.parallel.world > 1 or spec.parallel.offload == "full") and "RANK" not in os.environ


def start_ranks(spec: RunSpec, arguments: list[str]) -> None:
    """Run `lmworks …arguments` on every rank, and end as they ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    world = spec.parallel.world
    refuse_too_many(spec)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "ERROR")
    quieten()
    os.environ[STARTED_BY] = str(os.getpid())
    try:
        with TemporaryDirectory(prefix="lmworks-ranks-") as logs:  # of the agent, which else leaves them behind
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=world,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                run_id=f"lmworks-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                rdzv_configs={"timeout": 120},
                max_restarts=0,
                monitor_interval=0.1,
            )
            elastic_launch(config, sys.executable)("-m", "lmworks", *arguments)
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: (blame(item[1].exitcode), item[1].timestamp))
        if first.exitcode < 0:
            name = signal.Signals(-first.exitcode).name
            typer.echo(f"lmworks: error: rank {rank} was ended by {name}; the run can be resumed", err=True)
        raise typer.Exit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from None
    except SignalException as stopped:
        raise typer.Exit(128 + stopped.sigval) from None
    finally:
        del os.environ[STARTED_BY]


def stop_with_starter() -> None:
    """Ask the kernel to stop this rank when the command that started it is killed: nobody else would then.

    The rank saves and ends, as after any SIGTERM. Linux alone has this.
    """
    starter = os.environ.pop(STARTED_BY, None)  # what a rank starts in its turn is not meant
    if starter is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(starter):  # it was killed before the kernel was asked
        sys.exit(128 + signal.SIGTERM)


def blame(code: int) -> int:
    """Which end is the cause, 0 first: a signal from outside, then a rank that failed and said why.

    Those that a SIGTERM ended did not fail: torchrun's agent sends it to the ranks that are left.
    """
    return 2 if code == -signal.SIGTERM else 0 if code < 0 else 1


def refuse_too_many(spec: RunSpec) -> None:
    """What takes several machines is not started on one."""
    import torch

    from ..spec import SpecError

    if spec.cluster.nodes > 1:
        raise SpecError(
            f"cluster.nodes = {spec.cluster.nodes}: start the run on every machine with torchrun, "
            "or write a job for all of them with `lmworks launch`"
        )
    if spec.cluster.device == "cpu" or not torch.cuda.is_available():
        return
    here = torch.cuda.device_count()
    if spec.parallel.world > here:
        raise SpecError(
            f"the layout needs {spec.parallel.world} GPUs and this machine has {here}: start it on several with "
            "torchrun or `lmworks launch`, or set cluster.device = 'cpu'"
        )


def quieten() -> None:
    """The agent's own reports of a failure repeat what the rank has said, at length."""
    import logging

    for name in list(logging.root.manager.loggerDict):  # each of its modules has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
