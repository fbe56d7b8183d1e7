"""The agent that started this rank: torchrun's, or `lmworks train` with torchrun's underneath.

It hosts the store of the rendezvous, so the store is lost when the agent is killed. A rank checks that before it uses
the store: PyTorch prints a C++ stack to standard error for every failed call.
"""

from __future__ import annotations

import os

from ..record.heartbeat import read_stat

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
