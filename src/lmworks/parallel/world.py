"""Process-group setup, and error propagation between ranks.

`torchrun` (or `lmworks train`, which starts torchrun) sets rank and world size in the environment. Without them there
is one process and no process group, and every function here just calls its argument.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..record.oom import as_oom
from ..spec import Grid, LMWorksError, ParallelSpec, SpecError, TrainingError
from .mesh import Mesh
from .rendezvous import AGENT_KILLED, agent_died, private_store, record_agent, uses_agent_store

T = TypeVar("T")
ERROR_KEY = "lmworks/rank-error"
UNKNOWN_RANK = -1  # the rank died without posting; another rank found out
TIMEOUT_MARGIN_S = 15.0  # the timeout of process groups is above the watchdog's
GLOO_ERRORS = ("gloo", "pair closure", "connection closed by peer", "connection reset by peer")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # objects and checkpoints are sent over gloo


def launched() -> bool:
    """Whether torchrun started this process as a rank, be it of a world of one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_zero() -> bool:
    """Only rank 0 prints and writes the run folder."""
    return int(os.environ.get("RANK", 0)) == 0 if launched() else True


def init_distributed(parallel: ParallelSpec, device: torch.device, timeout_s: float = 1800) -> Mesh | None:
    """Create the process groups; None for a single process.

    The watchdog ends a collective after `timeout_s` and diagnoses it. The process groups have a longer timeout, which
    matters only before the watchdog runs.
    """
    if not launched():
        if parallel.world > 1 or parallel.offload == "full":
            raise SpecError(
                f"this layout needs {parallel.world} ranks, and none was started; "
                f"start it with: torchrun --nproc-per-node {parallel.world} -m lmworks.train …"
            )
        return None
    # A group that exists already may be that of a part of the ranks (align/rollout_link.py).
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if started != parallel.world:
        raise collective_error(
            SpecError(
                f"the layout (pp × dp × cp × tp = {parallel.pp} × {parallel.dp} × {parallel.cp} × {parallel.tp}) needs "
                f"{parallel.world} ranks, but {started} were started"
            )
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Newer versions rename collectives that the oldest we support, and PyTorch's own FSDP, know by the old names only.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives on record; older versions record none
    # PyTorch reads it where it makes a process group, subgroups too.
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = str(int(parallel.comm_priority == "high"))
    limit = group_timeout(timeout_s)
    if not dist.is_initialized():
        record_agent()
        store = private_store(limit) if uses_agent_store() else None
        rank = int(os.environ["RANK"])
        dist.init_process_group(BACKENDS[device.type], timeout=limit, store=store, rank=rank, world_size=started)
    mesh = Mesh(Grid.of(parallel), device.type)
    set_group_timeouts(limit)
    return mesh


def group_timeout(timeout_s: float) -> timedelta:
    """Of process groups, above that of the watchdog."""
    return timedelta(seconds=1.5 * timeout_s + TIMEOUT_MARGIN_S)


def set_group_timeouts(limit: timedelta) -> None:
    """Of every existing group: a subgroup does not inherit the timeout of the default group."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # new in 2.15
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(limit, group)


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def distributed_shutdown() -> Iterator[None]:
    """Destroy the process groups after the work, if it succeeded or all ranks raised the same error.

    After any other error, or when a rank was lost, the call might never return.
    """
    try:
        yield
    except LMWorksError as error:
        if error.collective and not error.rank_lost:
            shutdown()
        raise
    shutdown()


def run_on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on any, all ranks raise the error of the lowest failed rank.

    Otherwise the others would hang in their next collective.
    """
    if not dist.is_initialized():
        return work()
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = as_oom(error)
    for posted in all_gather_object(None if failure is None else as_rank_error(failure, dist.get_rank())):
        if posted is not None:
            if failure is not None and posted.rank == dist.get_rank():
                raise collective_error(failure)
            raise remote_error(posted)
    return result


def run_on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0; all ranks return its result or raise its error."""
    if not dist.is_initialized():
        return work()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = as_oom(error)
            outcome[1] = as_rank_error(failure, 0)
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise collective_error(failure)
    if outcome[1] is not None:
        raise remote_error(outcome[1])
    return outcome[0]


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank (of `group`), in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class RankMonitor(Protocol):
    """Diagnoses a rank that died without posting an error; the watchdog of train/watch is one."""

    def dead_ranks(self) -> str | None:
        """The ranks whose processes have ended, as text; returns at once."""

    def diagnose(self) -> str | None:
        """The cause as the reports of all ranks show it; takes seconds."""


def root_cause(error: Exception, monitor: RankMonitor | None = None) -> Exception:
    """What to raise for an error inside a step, where no collective propagates errors.

    A rank that fails posts its error in the store of the process group. The others see a broken connection, and look
    the cause up there; the failed rank has reported it. For a rank that died without posting, the first rank that
    notices posts the cause.
    """
    if not dist.is_initialized() or (isinstance(error, LMWorksError) and error.collective):
        return error
    store = dist.distributed_c10d._get_default_store()
    if not is_peer_loss(error):
        post_error(store, as_rank_error(error, dist.get_rank()))
        return error
    posted = wait_for_error(store, monitor)
    if posted is None and agent_died():
        posted = RankError(AGENT_KILLED)
    if posted is None and monitor is not None:
        cause = monitor.diagnose()
        posted = RankError(cause) if cause else None
    if posted is None:
        posted = RankError("another rank ended without an error message")
    if posted.rank == UNKNOWN_RANK:
        lost = TrainingError(f"{posted.message}; the run can be resumed")
        lost.rank_lost = True
        return collective_error(lost)
    remote = remote_error(posted)
    remote.reported = remote.rank_lost = True
    return remote


class RankError(NamedTuple):
    """An error of one rank, as it is sent to the others."""

    message: str
    code: int = TrainingError.exit_code
    rank: int = UNKNOWN_RANK  # where it was raised
    facts: Mapping[str, Any] = {}


def post_error(store: Any, error: RankError) -> None:
    if agent_died():
        return
    with suppress(RuntimeError):  # the store may be lost too
        store.compare_set(ERROR_KEY, "", json.dumps(error))


def wait_for_error(store: Any, monitor: RankMonitor | None, timeout_s: float = 2.0) -> RankError | None:
    """The error was posted before the connection broke, but through the store, and may arrive later."""
    deadline = time.monotonic() + timeout_s
    while True:
        last = time.monotonic() >= deadline  # one more look after the last sleep, which a busy machine may prolong
        dead = monitor.dead_ranks() if monitor is not None else None
        error = read_error(store)
        if error is not None:
            return error
        if dead is not None:
            post_error(store, RankError(dead))
            return RankError(dead)
        if last:
            return None
        time.sleep(0.05)


def read_error(store: Any) -> RankError | None:
    if agent_died():
        return None
    with suppress(RuntimeError):
        if store.check([ERROR_KEY]):
            return RankError(*json.loads(store.get(ERROR_KEY)))
    return None


def is_peer_loss(error: Exception) -> bool:
    """Whether a collective failed because of another rank. Gloo's errors have no type of their own."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in GLOO_ERRORS)


class RemoteRankError(LMWorksError):
    """Another rank failed and reports it; this one only ends."""


def as_rank_error(error: Exception, rank: int) -> RankError:
    if isinstance(error, LMWorksError):
        return RankError(error_text(error), error.exit_code, rank, error.facts)
    return RankError(error_text(error), rank=rank)


def error_text(error: BaseException) -> str:
    """The message that other ranks get."""
    cause = as_oom(error) if isinstance(error, Exception) else error
    return str(cause) if isinstance(cause, LMWorksError) else f"{type(error).__name__}: {error}"


def remote_error(posted: RankError) -> RemoteRankError:
    prefix = f"rank {posted.rank}: "
    unprefixed = posted.rank and not posted.message.startswith(prefix)
    error = RemoteRankError(prefix + posted.message if unprefixed else posted.message)
    error.exit_code, error.facts, error.collective = posted.code, posted.facts, True
    return error


def collective_error(error: Exception) -> Exception:
    """Mark an error that every rank raises, so that only rank 0 prints it."""
    if isinstance(error, LMWorksError):
        error.collective = True
    return error
