"""Ranks of a new generation find one another in a store that is full of what the one before has left."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lmworks.parallel import rendezvous
from lmworks.parallel.rendezvous import agree_on_prefix
from lmworks.spec import TrainingError

SOON = 60.0


def generation(store: dist.Store, world: int, late: int) -> list[str]:
    """Rank `late` comes after all others, which look at what its predecessor left in the meantime."""

    def rank(number: int) -> str:
        if number == late:
            time.sleep(0.1)
        return agree_on_prefix(store, number, world, time.monotonic() + SOON)

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(rank, range(world)))


def test_every_generation_agrees_on_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [generation(store, 3, late) for late in (0, 1, 2, 0)]
    assert all(len(set(found)) == 1 for found in names)
    assert len({found[0] for found in names}) == 4


def test_one_rank_meets_nobody() -> None:
    assert agree_on_prefix(dist.HashStore(), 0, 1, time.monotonic()) != ""


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1"), (1, "rank 0")])
def test_who_does_not_come_is_named(rank: int, missing: str) -> None:
    store = dist.HashStore()
    generation(store, 2, late=0)
    with pytest.raises(TrainingError, match=f"{missing} did not join the rendezvous"):
        agree_on_prefix(store, rank, 2, time.monotonic() + 0.1)


def test_an_agent_that_exits_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie is still the parent: its other threads may not have ended."""
    with subprocess.Popen(["sleep", "60"]) as agent:
        monkeypatch.setattr(rendezvous, "agent_pid", agent.pid)
        monkeypatch.setattr(rendezvous.os, "getppid", lambda: agent.pid)
        assert not rendezvous.agent_died()
        agent.kill()
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        assert rendezvous.agent_died()
