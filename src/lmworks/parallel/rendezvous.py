"""Rendezvous of restarted ranks: each generation uses a store prefix of its own, apart from stale entries.

torchrun's agent keeps one store for all generations of its ranks. A rank that reads a peer's address before the new
peer has written it waits forever for a dead process (PyTorch adds no prefix by generation). The restart count does not
identify a generation: every node counts for itself, and a node that joined later has not counted.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..record.heartbeat import read_stat
from ..spec import TrainingError

POLL_S = 0.01


def private_store(limit: timedelta) -> Store:
    """The agent's store under a prefix that rank 0 of this generation has chosen and sent to every other rank."""
    store, rank, world = next(rendezvous("env://", timeout=limit))
    name = agree_on_prefix(store, rank, world, time.monotonic() + limit.total_seconds())
    return PrefixStore(f"lmworks/{name}", store)


def agree_on_prefix(store: Store, rank: int, world: int, deadline: float) -> str:
    """Every other rank announces a fresh token; rank 0 answers it with token + prefix, so no stale answer matches."""
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"lmworks/token/{rank}", mine)
        while not (answer := read(store, f"lmworks/prefix/{rank}")).startswith(mine):
            wait(deadline, "rank 0")
        name = answer.removeprefix(mine)
        store.set(f"lmworks/joined/{rank}", name)
        return name
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if token := read(store, f"lmworks/token/{other}"):  # maybe of an earlier generation: that one never joins
                store.set(f"lmworks/prefix/{other}", token + mine)
        missing -= {other for other in missing if read(store, f"lmworks/joined/{other}") == mine}
        if missing:
            wait(deadline, f"rank {min(missing)}")
    return mine


def read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def wait(deadline: float, peer: str) -> None:
    if time.monotonic() > deadline:
        raise TrainingError(f"{peer} did not join the rendezvous; the run can be resumed")
    time.sleep(POLL_S)


# --- the agent that hosts the store ----------------------------------------------------------------------

# torchrun's, or that of `lmworks train`. The store is lost when the agent is killed. A rank checks that before it uses
# the store: PyTorch prints a C++ stack to standard error for every failed call.

AGENT_KILLED = "the agent that started the ranks was killed"
agent_pid: int | None = None  # None: no agent started this rank


def uses_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def record_agent() -> None:
    """Called at the rendezvous: the parent process at that time is the agent."""
    global agent_pid
    agent_pid = os.getppid() if uses_agent_store() else None


def agent_died() -> bool:
    """Also while it exits: the kernel signals its ranks when the main thread ends, maybe before the other threads."""
    if agent_pid is None:
        return False
    try:
        return os.getppid() != agent_pid or read_stat(f"/proc/{agent_pid}/stat")[0] in "ZX"
    except OSError:  # it has ended meanwhile, or there is no /proc
        return os.getppid() != agent_pid
