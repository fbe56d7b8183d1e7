"""The agent that started this rank: torchrun's, or `lmworks train` with torchrun's underneath.

It hosts the store in which the ranks met, so when it is killed the store is gone too. A rank must know that before it
asks: PyTorch answers with a C++ stack on standard error for every call.
"""

from __future__ import annotations

import os

KILLED = "the agent that started the ranks was killed"
starter: int | None = None  # its process, where one started this rank


def kept_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def remember() -> None:
    """When the ranks meet: whoever is the parent then is the agent."""
    global starter
    starter = os.getppid() if kept_by_agent() else None


def gone() -> bool:
    return starter is not None and os.getppid() != starter
