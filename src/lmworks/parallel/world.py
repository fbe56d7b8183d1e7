"""The ranks of a run: joining them, and doing things once or all together.

Whoever starts the processes (`torchrun`, or `lmworks train` with torchrun underneath) says in the environment which
rank this is. Without that there is one process and no group: every function here then simply does its work.
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
from . import elastic_agent
from .mesh import Mesh
from .rendezvous import private_store

T = TypeVar("T")
LAST_WORDS = "lmworks/last-words"
NOBODY = -1  # says it of himself: another rank found it out
LATER_S = 15.0  # what the process groups wait longer than those who watch over them
GLOO_SAYS = ("gloo", "pair closure", "connection closed by peer", "connection reset by peer")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # objects and checkpoints travel over the CPU's


def launched() -> bool:
    """Whether this process was started as one rank of several (or of one, by torchrun)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_lead() -> bool:
    """Rank 0 alone prints, and writes the run folder."""
    return int(os.environ.get("RANK", 0)) == 0 if launched() else True


def join(parallel: ParallelSpec, device: torch.device, timeout_s: float = 1800) -> Mesh | None:
    """Meet the other ranks; None where this process is alone.

    Whoever watches over the run ends a collective after `timeout_s`, and can say why; the process groups themselves
    give up later, for the time when nobody watches yet.
    """
    if not launched():
        if parallel.world > 1 or parallel.offload == "full":
            raise SpecError(
                f"this layout needs {parallel.world} ranks, and none was started; "
                f"start it with: torchrun --nproc-per-node {parallel.world} -m lmworks.train …"
            )
        return None
    started = int(os.environ["WORLD_SIZE"])
    if started != parallel.world:
        raise known(
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
    limit = timedelta(seconds=1.5 * timeout_s + LATER_S)
    if not dist.is_initialized():
        elastic_agent.remember()
        store = private_store(limit) if elastic_agent.kept_by_agent() else None
        rank = int(os.environ["RANK"])
        dist.init_process_group(BACKENDS[device.type], timeout=limit, store=store, rank=rank, world_size=started)
    mesh = Mesh(Grid.of(parallel), device.type)
    limit_waits(limit)
    return mesh


def limit_waits(limit: timedelta) -> None:
    """In every group that there is: one that was made for some of the ranks does not have the limit of all."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(limit, group)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leaving() -> Iterator[None]:
    """Part from the other ranks after the work: where it is done, or all of them have raised the same error.

    After any other, or where a rank was lost, somebody may never come to the parting.
    """
    try:
        yield
    except LMWorksError as error:
        if error.agreed and not error.lost:
            leave()
        raise
    leave()


def together(work: Callable[[], T]) -> T:
    """Every rank does `work`; if any of them fails, all raise what the first of them raised.

    Else the others would wait in their next collective for a rank that will never come.
    """
    if not dist.is_initialized():
        return work()
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = as_oom(error)
    failures: list[Words | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, as_message(failure, dist.get_rank()) if failure is not None else None)
    for words in failures:
        if words is not None:
            raise known(failure) if failure is not None and words.rank == dist.get_rank() else rebuilt(words)
    return result


def from_lead(work: Callable[[], T]) -> T:
    """Rank 0 does `work`, and all get its result, or raise its error."""
    if not dist.is_initialized():
        return work()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure = as_oom(error)
            outcome[1] = as_message(failure, 0)
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        raise known(failure)
    if outcome[1] is not None:
        raise rebuilt(outcome[1])
    return outcome[0]


class Onlooker(Protocol):
    """Whoever can tell what became of a rank that left no word: train/watch."""

    def gone(self) -> str | None:
        """Which ranks' processes have ended, at a glance."""

    def why(self) -> str | None:
        """What all ranks together make of it. Takes seconds."""


def explained(error: Exception, onlooker: Onlooker | None = None) -> Exception:
    """What to raise for an error in the middle of a step, where no rank waits to hear how the others fared.

    The rank that fails leaves word in the store through which the ranks once met. The others find a neighbour gone,
    and look there for the cause; it has been said by the one that failed. Of a rank that could not leave any, the
    first to find out does.
    """
    if not dist.is_initialized() or (isinstance(error, LMWorksError) and error.agreed):
        return error
    store = dist.distributed_c10d._get_default_store()
    if not is_loss(error):
        leave_words(store, as_message(error, dist.get_rank()))
        return error
    words = find_words(store, onlooker)
    if words is None and elastic_agent.gone():
        words = Words(elastic_agent.KILLED)
    if words is None and onlooker is not None:
        found = onlooker.why()
        words = Words(found) if found else None
    if words is None:
        words = Words("another rank is gone without a word")
    if words.rank == NOBODY:
        lost = TrainingError(f"{words.message}; the run can be resumed")
        lost.lost = True
        return known(lost)
    told = rebuilt(words)
    told.said = told.lost = True
    return told


class Words(NamedTuple):
    """What a rank tells the others of an error."""

    message: str
    code: int = TrainingError.exit_code
    rank: int = NOBODY  # whose error it is
    facts: Mapping[str, Any] = {}


def leave_words(store: Any, words: Words) -> None:
    if elastic_agent.gone():
        return
    with suppress(RuntimeError):  # the store may be gone too
        store.compare_set(LAST_WORDS, "", json.dumps(words))


def find_words(store: Any, onlooker: Onlooker | None, patience_s: float = 2.0) -> Words | None:
    """They were left before the connection was lost, but by another way."""
    give_up = time.monotonic() + patience_s
    while True:
        last = time.monotonic() >= give_up  # a look after the last wait, however long a busy machine made that
        gone = onlooker.gone() if onlooker is not None else None
        words = read_words(store)
        if words is not None:
            return words
        if gone is not None:
            leave_words(store, Words(gone))
            return Words(gone)
        if last:
            return None
        time.sleep(0.05)


def read_words(store: Any) -> Words | None:
    if elastic_agent.gone():
        return None
    with suppress(RuntimeError):
        if store.check([LAST_WORDS]):
            return Words(*json.loads(store.get(LAST_WORDS)))
    return None


def is_loss(error: Exception) -> bool:
    """Whether a collective failed because of another rank. Gloo's errors have no type of their own."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in GLOO_SAYS)


class Elsewhere(LMWorksError):
    """Another rank failed and reports it; this one only ends."""


def as_message(error: Exception, rank: int) -> Words:
    if isinstance(error, LMWorksError):
        return Words(told(error), error.exit_code, rank, error.facts)
    return Words(told(error), rank=rank)


def told(error: BaseException) -> str:
    """In words for other ranks."""
    cause = as_oom(error) if isinstance(error, Exception) else error
    return str(cause) if isinstance(cause, LMWorksError) else f"{type(error).__name__}: {error}"


def rebuilt(words: Words) -> Elsewhere:
    error = Elsewhere(by_rank(words.message, words.rank))
    error.exit_code, error.facts, error.agreed = words.code, words.facts, True
    return error


def by_rank(message: str, rank: int) -> str:
    """With the rank before it, where it is not the first and does not say so itself."""
    return f"rank {rank}: {message}" if rank and not message.startswith(f"rank {rank}: ") else message


def known(error: Exception) -> Exception:
    """Every rank raises it, so rank 0 alone needs to say it."""
    if isinstance(error, LMWorksError):
        error.agreed = True
    return error
